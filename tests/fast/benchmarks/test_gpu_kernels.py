# SPDX-License-Identifier: Apache-2.0
"""What a decode step takes on a GPU, by the code that the compiler writes for an H100; no GPU is needed."""

import pytest
import torch

from benchmarks.command_line import in_tree
from benchmarks.cuda_without_gpu import inductor
from benchmarks.cuda_without_gpu.fake import decode_step, fake_cuda
from ngrpo.rollout.sample_tokens import exponentials, sample_by_blocks, sample_tokens
from perturbations import create, streams
from perturbations.row_blocks import BLOCK, _largest_by_blocks, entropy, largest, log_total, summary

pytestmark = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs PyTorch's build for CPUs")

SIZE = 1024, 151_936, 3584
# The costliest of each kind; the others are counted by `make test-all`.
FAST = ("none", "gumbel", "hrpo", "latent", "neighbor")
OF_THE_TREE = sorted({"none", *in_tree()})
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in OF_THE_TREE]


@pytest.mark.more
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # neighbor at rate 1
def test_a_step_is_a_handful_of_kernels_and_little_beyond_one_pass(name: str) -> None:
    cost = decode_step(create(name) if name == "none" else create(name, rate=1.0), *SIZE)
    assert cost.beyond_draw <= (8 if name == "none" else 20)
    assert cost.bytes <= 1.5e9
    batch, vocabulary, _hidden = SIZE
    one_pass = 4 * batch * vocabulary
    draw = cost.regions["draw"]
    assert one_pass < draw.bytes < 1.15 * one_pass
    assert draw.kernels <= 4


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", OF_THE_TREE)
def test_every_kernel_compiles_to_machine_code(name: str, capability: int) -> None:
    perturbation = create(name) if name == "none" else create(name, rate=0.9)
    cost = decode_step(perturbation, *SIZE, capability=capability)
    with inductor.compiling_for(capability):
        for region in cost.regions.values():
            assert all(size > 0 for size in inductor.cubins(region).values())


def test_bfloat16_logits_are_read_as_they_are() -> None:
    def draw(scaled: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens, row_summary = sample_by_blocks(scaled, None, keys)
        return tokens, *row_summary

    batch = 128
    vocabulary = SIZE[1]
    with inductor.compiling_for(90) as compile_region, fake_cuda(), torch.inference_mode():
        logits = torch.empty(batch, vocabulary, dtype=torch.bfloat16, device="cuda")
        keys = torch.empty(batch, dtype=torch.int64, device="cuda")
        region = compile_region(draw, logits, keys)
    assert region.bytes < 1.3 * 2 * batch * vocabulary
    # One program for some blocks and not for a row: a row of 2,374 blocks fills a device of 132 by itself.
    _name, first_kernel = region.triton[0]
    assert f"xnumel = {batch * vocabulary // BLOCK}" in first_kernel


def test_draws_at_counters_compile() -> None:
    """Inductor computes indices in 32 bits, and a counter times a constant is one to it."""
    with inductor.compiling_for(90) as compile_region, fake_cuda(), torch.inference_mode():
        keys = torch.empty(8, dtype=torch.int64, device="cuda")
        region = compile_region(lambda keys: streams.uniform(keys, 64), keys)
    with inductor.compiling_for(90):
        assert all(size > 0 for size in inductor.cubins(region).values())


# --- rows in blocks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [70, 1024, 4096, 5001])
@pytest.mark.parametrize("k", [1, 5, 33, 64, 70])
def test_the_largest_by_blocks_are_those_of_a_sort_and_on_a_gpu_ties_stand_by_rising_id(
    vocabulary: int, k: int
) -> None:
    generator = torch.Generator().manual_seed(k)
    logits = (torch.randn(6, vocabulary, generator=generator) * 12).round() / 4
    logits[0, [17, 40, -3]] = 20.0
    logits[1, :-2] = -torch.inf
    logits[2, ::2] = 0.0
    logits[2, 1::2] = -0.0
    sorted_values, sorted_ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    values, ids = _largest_by_blocks(logits, k, summary(logits).maxima)
    assert torch.equal(values, sorted_values[:, :k])
    assert torch.equal(ids, sorted_ids[:, :k])
    ids_of_single_rows = [_largest_by_blocks(row, k, summary(row).maxima)[1] for row in logits.split(1)]
    assert torch.equal(ids, torch.cat(ids_of_single_rows)), "in any batch"
    no_rows = logits[:0]
    assert _largest_by_blocks(no_rows, k, summary(no_rows).maxima)[1].shape == (0, k)

    cpu_values, cpu_ids = largest(logits, k)
    assert torch.equal(cpu_values, sorted_values[:, :k])
    assert torch.equal(cpu_values, logits.gather(-1, cpu_ids))
    assert all(len(set(row_ids)) == k for row_ids in cpu_ids.tolist())
    if k == 1:
        assert torch.equal(cpu_ids[:, 0], logits.argmax(dim=-1)), "an anchor is the token of a greedy request"
    cpu_ids_of_single_rows = [largest(row, k)[1] for row in logits.split(1)]
    assert torch.equal(cpu_ids, torch.cat(cpu_ids_of_single_rows))


def test_sums_by_blocks_are_those_of_whole_rows() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)) * 5
    logits[1, 3:] = -torch.inf
    row_summary = summary(logits)
    assert torch.allclose(row_summary.log_total, torch.logsumexp(logits, dim=-1))
    assert torch.allclose(entropy(logits, row_summary.log_total), entropy(logits), atol=1e-5)
    scale = torch.tensor([[0.5], [1.0], [2.0], [3.0], [0.1]])
    scaled = logits * scale
    assert torch.allclose(log_total(scaled, row_summary.maxima * scale), torch.logsumexp(scaled, dim=-1))


@pytest.mark.parametrize("filtered", [False, True])
def test_the_draw_by_blocks_takes_the_tokens_that_the_draw_by_rows_takes(filtered: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(300, 1000, generator=generator) * 2
    keys = torch.randint(-(2**62), 2**62, (300,), generator=generator)
    drawable = logits.masked_fill(logits < 2.0, -torch.inf) if filtered else None
    tokens, row_summary = sample_by_blocks(logits, drawable, keys)
    drawable_logits = logits if drawable is None else drawable
    scores = drawable_logits - exponentials(keys, 1000).log()
    assert torch.equal(tokens, scores.argmax(dim=-1))
    assert torch.equal(tokens, sample_tokens(logits, drawable, keys)[0])
    assert torch.allclose(row_summary.log_total, torch.logsumexp(logits, dim=-1))
