# SPDX-License-Identifier: Apache-2.0
"""Neighbor indices on a real model's embeddings: the graph's recall, and the time and memory of graph and exact index.

    python -m benchmarks.neighbors [--model smollm2-135m | --random 151936 1536] [--metrics cosine l2 dot]
                                   [--tokens 2000] [--words]

Recall: of the two nearest tokens by the exact index, the share that the graph finds, over tokens spread evenly over
the vocabulary. Times of queries are the best of several, and the build's is of the processor: both hold on a machine
that others use too. Whole table: two neighbors of every token, at the pace of blocks of 64 (exact) after the build
(hnsw). `--random` takes random rows of this size instead of a model's, around a common vector as embeddings have it.

`--words` prints examples of the same-word filter instead.
"""

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.command_line import add_model, parser_of
from benchmarks.machine import describe
from ngrpo.machine.models.packaged import resolve
from perturbations.neighbors import ExactIndex, HnswIndex, OtherWords, TableIndex, word_numbers

EXAMPLES = [" apple", " therefore", " run", " city", " Paris", " because", " small", " idea", " walked", " Berlin"]
_BLOCK = 64  # tokens of a query
_SINGLES = 60  # timed queries for one token


def load_embedding(folder: str) -> Tensor:
    """The input embedding matrix of a Hugging Face folder, in the type that it is stored in."""
    from safetensors import safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a mapping)
                if name.endswith("embed_tokens.weight"):
                    return weights.get_tensor(name)
    raise ValueError(f"no embed_tokens.weight in {folder}")


def random_rows(size: int, width: int) -> Tensor:
    """(V, D) bfloat16 rows around a common one."""
    draws = torch.Generator().manual_seed(0)
    common = torch.randn(width, generator=draws)
    blocks = []
    for first in range(0, size, 4096):
        noise = torch.randn(min(4096, size - first), width, generator=draws)
        blocks.append((0.05 * (common + noise)).bfloat16())
    return torch.cat(blocks)


def seconds(work: Callable[..., Any], *args: Any) -> float:
    began = time.perf_counter()
    work(*args)
    return time.perf_counter() - began


class Cost(NamedTuple):
    """A row of the table.

    Attributes:
        recall: of two neighbors.
        build: seconds of the processor.
        whole_table: seconds for two neighbors of every token.
        one: milliseconds of a query for one new token.
        of_block: milliseconds of a token in queries for blocks.
        memory: bytes.
    """

    recall: float
    build: float
    whole_table: float
    one: float
    of_block: float
    memory: int


def on_demand(index: TableIndex, tokens: Tensor) -> tuple[float, float]:
    """Milliseconds of a query for one new token (best of 60), and per token in blocks of 64 (best of 20)."""
    singles = tokens[:_SINGLES].split(1)
    blocks = tokens[_SINGLES : _SINGLES + 20 * _BLOCK].split(_BLOCK)
    fastest_single = min(seconds(index.search, token, 2) for token in singles)
    fastest_block = min(seconds(index.search, block, 2) for block in blocks)
    return 1e3 * fastest_single, 1e3 * fastest_block / _BLOCK


def two_nearest(index: TableIndex, tokens: Tensor) -> Tensor:
    """The ids of two neighbors of each token, (N, 2)."""
    return torch.cat([index.search(block, 2)[0] for block in tokens.split(_BLOCK)])


def measure(embedding: Tensor, metric: str, count: int) -> None:
    """Prints the rows of a metric: the exact index, and the graph."""
    size = len(embedding)
    tokens = torch.arange(count) * size // count
    shuffled = tokens[torch.randperm(count, generator=torch.Generator().manual_seed(0))]

    exact = ExactIndex(embedding, metric)
    exact_ids = two_nearest(exact, tokens)
    one, of_block = on_demand(exact, shuffled)
    memory = 8 * 2 * size + 9 * size  # ids and scores; a norm and a flag of each token
    report(metric, "exact", Cost(1.0, 0.0, size * of_block / 1e3, one, of_block, memory))
    followed = tokens[:: max(1, count // 128)][:128]
    drift = min(seconds(lambda: ExactIndex(embedding, metric).query(followed, 2)) for _ in range(8))
    print(f"    drift of {len(followed)} tokens at a weight sync: {drift:.2f} s")

    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    graph = HnswIndex(embedding, metric)
    graph.search(tokens[:1], 2)  # builds it
    build = time.process_time() - began
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before
    graph_ids = two_nearest(graph, tokens)
    recall = (graph_ids.unsqueeze(-1) == exact_ids.unsqueeze(1)).any(dim=1).float().mean().item()
    one, of_block = on_demand(graph, shuffled)
    faiss_graph = graph._graph
    memory = 4 * (faiss_graph.ntotal * faiss_graph.d + faiss_graph.hnsw.neighbors.size())  # vectors and links
    report(metric, "hnsw", Cost(recall, build, build + size * of_block / 1e3, one, of_block, memory))
    print(f"    {graph.hubs} hubs, {graph.rerank} candidates scored; peak while building +{peak_kib / 1024:.0f} MiB")


def report(metric: str, index: str, cost: Cost) -> None:
    print(
        f"{metric:7s} {index:6s} {cost.recall:9.4f} {cost.build:8.1f} {cost.whole_table:12.1f} {cost.one:12.2f}"
        f" {cost.of_block:12.3f} {cost.memory / 2**20:10.1f}",
        flush=True,
    )


def show_words(model: str, embedding: Tensor) -> None:
    """Prints neighbors of examples with and without the same-word filter, and how often it acts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    exact = ExactIndex(embedding)
    began = time.perf_counter()
    words = word_numbers(texts, len(embedding))
    numbering_seconds = time.perf_counter() - began
    print(f"{len(set(words.tolist()))} words among {len(texts)} tokens, numbered in {numbering_seconds:.2f} s")
    filtered = OtherWords(exact, words)
    print("| token | two nearest | with `skip_same_word` |\n| --- | --- | --- |")
    for example in EXAMPLES:
        (token,) = tokenizer.encode(example, add_special_tokens=False)
        cells = []
        for index in (exact, filtered):
            ids = index.query(torch.tensor([token]), 2)[0][0].tolist()
            cells.append(", ".join(f"`{texts[i]!r}`" for i in ids))
        print(f"| `{example!r}` | {cells[0]} | {cells[1]} |")
    sample = torch.arange(0, len(embedding), 24)
    own_words = words[sample].unsqueeze(-1)
    same_word = words[two_nearest(exact, sample)] == own_words
    same_word_filtered = words[two_nearest(filtered, sample)] == own_words
    print(
        f"of {len(sample)} tokens, {same_word.any(-1).float().mean():.1%} have the same word among their two nearest,"
        f" {same_word.all(-1).float().mean():.1%} twice;"
        f" with the filter {same_word_filtered.any(-1).float().mean():.1%}"
    )


def main() -> None:
    parser = parser_of(__doc__)
    add_model(parser)
    parser.add_argument("--metrics", nargs="+", default=["cosine", "l2", "dot"])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--random", type=int, nargs=2, metavar=("V", "D"))
    parser.add_argument("--words", action="store_true")
    options = parser.parse_args()
    if options.random and options.words:
        parser.error("--words needs the tokens of a model: leave out --random")
    if options.random:
        name = "random rows"
        embedding = random_rows(*options.random)
    else:
        name = options.model
        embedding = load_embedding(resolve(options.model))
    print(f"{describe()}; {name}, {len(embedding)} x {embedding.shape[1]} {embedding.dtype}", flush=True)
    if options.words:
        show_words(resolve(options.model), embedding)
        return
    print(
        f"{'metric':7s} {'index':6s} {'recall@2':>9s} {'build s':>8s} {'whole table s':>12s} {'one new ms':>12s}"
        f" {'of 64, ms':>12s} {'MiB':>10s}"
    )
    for metric in options.metrics:
        measure(embedding, metric, options.tokens)


if __name__ == "__main__":
    main()
