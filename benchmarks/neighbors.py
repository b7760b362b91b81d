# SPDX-License-Identifier: Apache-2.0
"""Neighbor indices on a real model's embeddings: the graph's recall, and the time and memory of graph and exact index.

    python -m benchmarks.neighbors [--model smollm2-135m | --random 151936 1536] [--metrics cosine l2 dot]
                                   [--tokens 2000] [--words | --hnswlib]

Recall: of the two nearest tokens by the exact index, the share that the graph finds, over tokens spread evenly over
the vocabulary. Times of queries are the best of several, and the build's is of the processor: both hold on a machine
that others use too. Whole table: two neighbors of every token, at the pace of blocks of 64 (exact) after the build
(hnsw). `--random` takes random rows of this size instead of a model's, around a common vector as embeddings have it.

Instead of that, `--words` prints examples of the same-word filter, and `--hnswlib` builds graphs of the same vectors by
faiss and by hnswlib (which is not among the requirements) and compares them.
"""

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe
from ngrpo.machine.models.packaged import resolve
from perturbations.neighbors import ExactIndex, HnswIndex, OtherWords, TableIndex, word_numbers

EXAMPLES = [" apple", " therefore", " run", " city", " Paris", " because", " small", " idea", " walked", " Berlin"]


def load_embedding(folder: str) -> Tensor:
    """The input embedding matrix of a Hugging Face folder, in the type that it is stored in."""
    from safetensors import safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a mapping)
                if name.endswith("embed_tokens.weight"):
                    return weights.get_tensor(name)
    raise ValueError(f"no embed_tokens.weight in {folder}")


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def on_demand(index: TableIndex, tokens: Tensor) -> tuple[float, float]:
    """Milliseconds of a query for one new token (best of 60), and per token in blocks of 64 (best of 20)."""
    single = [seconds(lambda t=t: index.search(t, 2)) for t in tokens[:60].split(1)]
    block = [seconds(lambda b=b: index.search(b, 2)) / 64 for b in tokens[60 : 60 + 20 * 64].split(64)]
    return 1e3 * min(single), 1e3 * min(block)


def measure(embedding: Tensor, metric: str, count: int) -> None:
    size = len(embedding)
    tokens = torch.arange(count) * size // count
    shuffled = tokens[torch.randperm(count, generator=torch.Generator().manual_seed(0))]

    exact = ExactIndex(embedding, metric)
    want = torch.cat([exact.search(block, 2)[0] for block in tokens.split(64)])
    one, block = on_demand(exact, shuffled)
    report(metric, "exact", 1.0, 0.0, size * block / 1e3, one, block, 8 * 2 * size + 9 * size)
    followed = tokens[:: max(1, count // 128)][:128]
    drift = min(seconds(lambda: ExactIndex(embedding, metric).query(followed, 2)) for _ in range(8))
    print(f"    drift of {len(followed)} tokens at a weight sync: {drift:.2f} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    graph = HnswIndex(embedding, metric)
    graph.search(tokens[:1], 2)  # builds it
    built = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    ids = torch.cat([graph.search(part, 2)[0] for part in tokens.split(64)])
    recall = (ids.unsqueeze(-1) == want.unsqueeze(1)).any(dim=1).float().mean().item()
    one, block = on_demand(graph, shuffled)
    memory = 4 * (graph._graph.ntotal * graph._graph.d + graph._graph.hnsw.neighbors.size())  # vectors and links
    report(metric, "hnsw", recall, built, built + size * block / 1e3, one, block, memory)
    print(f"    {graph.hubs} hubs, {graph.rerank} candidates scored; peak while building +{peak / 1024:.0f} MiB")


def report(metric: str, *cells: Any) -> None:
    name, recall, built, whole, one, block, memory = cells
    print(
        f"{metric:7s} {name:6s} {recall:9.4f} {built:8.1f} {whole:12.1f} {one:12.2f} {block:12.3f}"
        f" {memory / 2**20:10.1f}",
        flush=True,
    )


def random_rows(size: int, width: int) -> Tensor:
    """(V, D) bfloat16 rows around a common one."""
    draws = torch.Generator().manual_seed(0)
    common = torch.randn(width, generator=draws)
    rows = [0.05 * (common + torch.randn(min(4096, size - i), width, generator=draws)) for i in range(0, size, 4096)]
    return torch.cat([part.bfloat16() for part in rows])


def compare_graphs(embedding: Tensor, metric: str, count: int) -> None:
    """faiss against hnswlib: the same vectors and settings, one thread, of two neighbors the share found by each."""
    import faiss
    import hnswlib

    graph = HnswIndex(embedding, metric)
    tokens = torch.arange(count) * len(embedding) // count
    want = torch.cat([ExactIndex(embedding, metric).search(block, 2)[0] for block in tokens.split(64)])
    faiss.omp_set_num_threads(1)

    class AsFaiss:
        """hnswlib's graph under the names that HnswIndex calls."""

        def __init__(self) -> None:
            self.hnsw = SimpleNamespace()
            self._graph = hnswlib.Index("l2", embedding.shape[1])
            self._graph.init_index(len(embedding), M=graph.links, ef_construction=graph.width_of_build)
            for part in torch.arange(len(embedding)).split(4096):
                self._graph.add_items(graph._placed(part).numpy(), num_threads=1)

        def search(self, rows: Any, k: int) -> tuple[Any, Any]:
            self._graph.set_ef(self.hnsw.efSearch)
            labels, distances = self._graph.knn_query(rows, k=k, num_threads=1)
            return distances, labels.astype("int64")

    for name, build in (("faiss", lambda: HnswIndex._graph.func(graph)), ("hnswlib", AsFaiss)):
        began = time.process_time()
        graph._graph = build()
        built = time.process_time() - began
        ids = torch.cat([graph.search(part, 2)[0] for part in tokens.split(64)])
        recall = (ids.unsqueeze(-1) == want.unsqueeze(1)).any(dim=1).float().mean().item()
        one, block = on_demand(graph, tokens[torch.randperm(count, generator=torch.Generator().manual_seed(0))])
        print(f"{metric} {name}: recall@2 {recall:.4f}, built in {built:.1f} s, one {one:.2f} ms, of 64 {block:.3f} ms")


def show_words(model: str, embedding: Tensor) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    exact = ExactIndex(embedding)
    began = time.perf_counter()
    words = word_numbers(texts, len(embedding))
    print(
        f"{len(set(words.tolist()))} words among {len(texts)} tokens, numbered in {time.perf_counter() - began:.2f} s"
    )
    other = OtherWords(exact, words)
    print("| token | two nearest | with `skip_same_word` |\n| --- | --- | --- |")
    for example in EXAMPLES:
        (token,) = tokenizer.encode(example, add_special_tokens=False)
        rows = [index.query(torch.tensor([token]), 2)[0][0].tolist() for index in (exact, other)]
        cells = [", ".join(f"`{texts[i]!r}`" for i in row) for row in rows]
        print(f"| `{example!r}` | {cells[0]} | {cells[1]} |")
    some = torch.arange(0, len(embedding), 24)
    plain = torch.cat([exact.search(block, 2)[0] for block in some.split(64)])
    same = words[plain] == words[some].unsqueeze(-1)
    filtered = torch.cat([other.search(block, 2)[0] for block in some.split(64)])
    left = words[filtered] == words[some].unsqueeze(-1)
    print(
        f"of {len(some)} tokens, {same.any(-1).float().mean():.1%} have the same word among their two nearest,"
        f" {same.all(-1).float().mean():.1%} twice; with the filter {left.any(-1).float().mean():.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--metrics", nargs="+", default=["cosine", "l2", "dot"])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--random", type=int, nargs=2, metavar=("V", "D"))
    parser.add_argument("--words", action="store_true")
    parser.add_argument("--hnswlib", action="store_true")
    options = parser.parse_args()
    folder = None if options.random else resolve(options.model)
    embedding = random_rows(*options.random) if options.random else load_embedding(folder)
    name = "random rows" if options.random else options.model
    print(f"{describe()}; {name}, {len(embedding)} x {embedding.shape[1]} {embedding.dtype}", flush=True)
    if options.words:
        show_words(folder, embedding)
        return
    if options.hnswlib:
        for metric in options.metrics:
            compare_graphs(embedding, metric, options.tokens)
        return
    print(
        f"{'metric':7s} {'index':6s} {'recall@2':>9s} {'build s':>8s} {'whole table s':>12s} {'one new ms':>12s}"
        f" {'of 64, ms':>12s} {'MiB':>10s}"
    )
    for metric in options.metrics:
        measure(embedding, metric, options.tokens)


if __name__ == "__main__":
    main()
