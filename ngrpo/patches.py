# SPDX-License-Identifier: Apache-2.0
"""Upstream patches: one table of the code in OpenRLHF, vLLM, verl, Ray, torch that is replaced, relied upon or called.

Upstream stays unmodified on disk. A row names the upstream definition, our replacement, the condition, the reason, and
the state of the upstream source that it was written against. `check` compares that state with the installed sources
before anything starts, so an upgrade that changes one of them is one clear error, and not a run that trains on
something else. ``python -m ngrpo.patches [FOLDER]`` prints the table and the states found, installed or in a folder
with the sources of another release.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

from ngrpo.machine.upstream.patch import IMPORT, Patch, place, source_of
from ngrpo.machine.upstream.versions import VLLM_OF_ROLLOUTS, installed
from perturbations.errors import UsageError

_OPENRLHF = "openrlhf 0.11.2"
_ACTOR, _LAUNCHER, _ENGINE = (f"openrlhf.trainer.ray.{name}" for name in ("ppo_actor", "launcher", "vllm_engine"))
_SAMPLES, _EXPERIENCE = (f"openrlhf.trainer.ppo_utils.{name}" for name in ("samples_generator", "experience_maker"))
_MODEL, _DEEPSPEED = "openrlhf.models.actor", "openrlhf.utils.deepspeed.deepspeed"
_WRAP, _PEFT = "openrlhf.trainer.ray.vllm_worker_wrap", "peft.tuners.lora.layer"
TRAINING = "training"
"""The condition of every run of `ngrpo train`."""
_DRAWN = "perturbation or reproducible or sampling_mask or sampling_schedule or routing"
"""The conditions under which a rollout is drawn otherwise."""

IN_VLLM, IN_SUPPORTED_VLLM, IN_PERTURBED_CORE = VLLM_CONDITIONS = ("vllm", "supported_vllm", "perturbed_vllm")
"""Every process of any vLLM; of a supported one; and the core of an engine that perturbs."""
_WORKER, _CORE = "v1.worker.gpu_worker", "v1.engine.core"
_RUNNER_V1, _RUNNER_V2 = "v1.worker.gpu_model_runner", "v1.worker.gpu.model_runner"
_SAMPLER_V2 = "v1.worker.gpu.sample"

_LOOP = "experimental.agent_loop"
_BASE, _SYNC, _LOOP_TQ = (f"trainer.ppo.v1.{name}" for name in ("trainer_base", "trainer_sync", "agent_loop_tq"))
_SERVER, _PADDING = "workers.rollout.vllm_rollout.vllm_async_server", "trainer.ppo.padding_utils"
_FSDP, _WORKERS = "workers.engine.fsdp.transformer_impl", "workers.engine_workers"


class PatchMismatch(UsageError):
    """Upstream code is not what a row of the table was written against."""


def _row(
    module: str, name: str, ours: str | None, when: str, upstream: str, why: str, checked: str = _OPENRLHF
) -> Patch:
    """A row; ``ours`` is of `ngrpo.trainers.openrlhf` where its module has no dot, else of `ngrpo.machine`."""
    path = ours and ours.partition(":")[0]
    if path and not path.startswith("ngrpo."):
        ours = f"{'ngrpo.machine' if '.' in path else 'ngrpo.trainers.openrlhf'}.{ours}"
    return Patch(module, name, ours, when, upstream, checked, why)


def _vllm(module: str, name: str, ours: str | None, upstream: str, why: str, when: str = IN_SUPPORTED_VLLM) -> Patch:
    """A row; ``module`` is without vLLM's name, ``ours`` is of `ngrpo.rollout`."""
    ours = ours and f"ngrpo.rollout.{ours}"
    return Patch(f"vllm.{module}", name, ours, when, upstream, f"vllm {VLLM_OF_ROLLOUTS}", why)


def _verl(module: str, attribute: str, upstream: str, why: str, ours: str | None = None) -> Patch:
    """A row; ``module`` is without verl's name, ``upstream`` without "sha:"."""
    return Patch(f"verl.{module}", attribute, ours, "verl", f"sha:{upstream}", "verl 0.9.1", why)


# fmt: off
OPENRLHF: tuple[Patch, ...] = (
    # ---- a machine without CUDA -------------------------------------------------------------------
    _row("torch.cuda", "current_device", "hardware.cpu:cuda_current_device", "cpu", "()",
        "OpenRLHF moves batches to torch.cuda.current_device()", "torch 2.13.0"),
    _row("torch.cuda", "set_device", "hardware.cpu:do_nothing", "cpu", "(device)",
        "DeepspeedStrategy.setup_distributed chooses a CUDA device", "torch 2.13.0"),
    _row("torch.cuda", "synchronize", "hardware.cpu:do_nothing", "cpu", "(device)",
        "torch_dist_barrier_and_cuda_sync waits for the device", "torch 2.13.0"),
    _row(_DEEPSPEED, "init_device_mesh", "hardware.cpu:device_mesh", "cpu", "import", 'asks for a mesh on "cuda"'),
    _row(_DEEPSPEED, "DeepspeedStrategy.moving_average", "model_actors:moving_average", "cpu",
        "(self, model, model_ema, beta, device)", 'the actor passes the device "cuda" (--train.enable_ema)'),
    _row("openrlhf.trainer.ppo_utils.replay_buffer", "NaiveReplayBuffer.__init__", "hardware.cpu:replay_buffer_init",
        "cpu", "sha:ee37108b4b5d", 'its target device is "cuda:{index}"'),
    _row("deepspeed.comm.torch", "build_shm_op", "hardware.cpu:do_nothing", "cpu", "()",
        "compiles an all-reduce kernel for half a minute, where gloo has one", "deepspeed 0.19.6"),
    _row("deepspeed.comm.torch", "TorchBackend.all_gather_into_tensor", "hardware.cpu:waited_for", "cpu",
        "(self, output_tensor, input_tensor, group, async_op)",
        "of several gathers DeepSpeed waits for the last, and gloo finishes them in any order", "deepspeed 0.19.6"),
    # ---- float32 on a CPU -------------------------------------------------------------------------
    _row("argparse", "_ActionsContainer.add_argument", "upstream.openrlhf_flags:with_float32", "cpu", "(self)",
        "OpenRLHF's --ds.param_dtype takes bf16 and fp16 only", "Python 3.12"),
    _row("openrlhf.utils.utils", "convert_to_torch_dtype", "hardware.cpu:with_float32", "cpu", "sha:9c59d2aa5133",
        "the same: the dtype that models are loaded in"),
    _row(_DEEPSPEED, "get_train_ds_config", "hardware.cpu:with_torch_adam", "cpu", "import",
        "DeepSpeed compiles its own Adam for one to two minutes; PyTorch's is there"),
    # ---- CUDA -------------------------------------------------------------------------------------
    _row(_DEEPSPEED, "get_train_ds_config", "hardware.cuda:with_available_adam", "any_adam", "import",
        "DeepSpeed compiles its own Adam; PyTorch's takes its place without toolkit, headers, libraries or ninja"),
    # ---- without flash-attn (see ngrpo.machine.hardware.stand_ins) ----------------------------------------
    _row("openrlhf.models.ring_attn_utils", IMPORT, "hardware.stand_ins:flash_attn_stand_in", "without_flash_attn",
        "import", "imports flash_attn at module level, packing or not"),
    _row("openrlhf.utils", "get_strategy", "hardware.stand_ins:attention_as_given", "without_flash_attn", "import",
        "is given flash_attention_2 where samples are packed, whatever the command line says"),
    _row(_LAUNCHER, "BaseDistributedActor._get_free_port", "hardware.processes:port_below_outgoing", TRAINING,
        "sha:2e43720d4972", "chooses a port long before it listens; an outgoing connection may have it by then"),
    _row("torch.utils.file_baton", "FileBaton.try_acquire", "hardware.build_locks:without_stale_lock", TRAINING,
        "(self)", "a build that was killed leaves its lock, which the next run would wait for", "torch 2.13.0"),
    # ---- the classes of OpenRLHF, one subclass each -----------------------------------------------
    _row("openrlhf.trainer.ppo_trainer", "PPOTrainer", "trainer:trainer", TRAINING, "sha:74b355e75a15",
        "measures join the step's log, and states the checkpoint; noise and temperature of each step"),
    _row("openrlhf.trainer.ppo_trainer_async", "TrainingActor", "trainer:trainer", TRAINING, "sha:ad079d89d655",
        "the same, where asynchronous"),
    _row("openrlhf.trainer.ppo_trainer_async", "GenerateSamplesActor", "trainer:generate_samples_actor", _DRAWN,
        "sha:330319997ada", "its checkpoint has the round, where asynchronous"),
    _row("openrlhf.trainer.ppo_trainer", "prepare_datasets", "trainer:prepare_datasets", "reproducible",
        "(strategy, tokenizer)", "the order of the prompts follows the seed"),
    _row("openrlhf.trainer.ppo_trainer", "blending_datasets", "prompt_rows:blending_datasets", TRAINING, "import",
        "our reader reads files, as in the checks and in evaluation; `datasets` changes labels to a column's type"),
    _row("openrlhf.datasets.prompts_dataset", "preprocess_data", "trainer:preprocess_data", "chat_template",
        "sha:1a21ceede6e1", "one function renders conversations, tools and template arguments, in evaluation too"),
    _row(_SAMPLES, "SamplesGenerator", "samples_generator:samples_generator", f"{_DRAWN} or sampling or second_round",
        "sha:11458b2545a7", "requests carry round, masks and temperature; batches start whole"),
    _row(_ENGINE, "RolloutRayActor", "rollout_actor:rollout_actor", TRAINING, "sha:6bda23ee4983",
        "checks rewards; gives vLLM the spec, requests their seeds, each response its record; syncs by file"),
    _row(_EXPERIENCE, "RemoteExperienceMaker", "experience_maker:experience_maker", TRAINING, "sha:351a52599ac6",
        "measures the rollout, and has advantages of its own"),
    _row(_EXPERIENCE, "compute_reward", "step_advantages:compute_reward", TRAINING, "import",
        "takes each micro batch's values of the estimator"),
    _row(_ACTOR, "PolicyModelActor", "model_actors:policy_model_actor",
        "perturbation or advantage or credit or policy_noise or sampling_mask or routing", "sha:8d664f8c8592",
        "its log-probabilities are of the replayed history, and among the tokens that sampling left"),
    _row(_LAUNCHER, "ReferenceModelActor", "model_actors:reference_model_actor",
        "perturbation or sampling_mask or routing", "sha:871e4cda19c1", "the same, through its own embedding"),
    _row(_ACTOR, "ActorPPOTrainer", "actor_trainer:actor_trainer", TRAINING, "sha:afd1137caf53",
        "the forward that is differentiated replays; its loss; the weight sync"),
    # ---- functions around them --------------------------------------------------------------------
    _row(_MODEL, "Actor.__init__", "model_actors:actor_init", "perturbation", "sha:ed617cb47dde",
        "a perturbation's learned parameters join the model before DeepSpeed wraps it"),
    _row(_MODEL, "Actor.__init__", "lora_sync:checked_actor", "lora", "sha:ed617cb47dde",
        "adapters that a merged weight cannot stand for are an error at once"),
    _row(_DEEPSPEED, "DeepspeedStrategy.save_model", "lora_sync:save_model", "lora", "sha:14c67be849f9",
        "saves a folder as PEFT does, and gathers the adapter alone; OpenRLHF's looks like a model without weights"),
    _row(_DEEPSPEED, "DeepspeedStrategy._get_model_parameters", "model_actors:get_model_parameters", "perturbation",
        "sha:c6c4dad36a87", "those parameters may have learning rates of their own"),
    _row(_MODEL, "log_probs_from_logits", "ngrpo.trainers.common.log_probs:with_overrides",
        "perturbation or sampling_mask or credit_in_loss", "import",
        "log-probabilities are among the tokens that sampling left; a density overrides the token's; a credit sees the"
        " logits"),
    _row("openrlhf.utils.vlm_utils", "merge_mm_train_inputs", "model_actors:merge_mm_train_inputs",
        "perturbation or sampling_mask or routing or second_round", "sha:adfa2c8a4cd8",
        "a multimodal model's forward gets its pictures, and not our records"),
    # ---- relied upon, not replaced ----------------------------------------------------------------
    _row("openrlhf.datasets.utils", "blending_datasets", None, TRAINING, "sha:3a7604eb8f88",
        "how names of datasets are written, and the order in which several of them are joined or drawn"),
    _row("openrlhf.trainer.ppo_trainer", "prepare_datasets", None, TRAINING, "sha:55832fcd023e",
        "uses the length and the method select of what blending_datasets returns"),
    _row("openrlhf.datasets.prompts_dataset", "PromptDataset", None, TRAINING, "sha:c67a76171e1f",
        "goes through the rows once, each a dictionary"),
    _row(_MODEL, "Actor.forward", None, "perturbation or sampling_mask or credit", "sha:65d2a2a0e02a",
        "calls log_probs_from_logits once, on all rows of the logits, divided by the temperature, and gives their"
        " entropy"),
    _row("openrlhf.models.loss", "PolicyLoss.forward", None, "second_round or credit_in_loss", "sha:e0e040c83640",
        "what the loss makes of log-probabilities, advantages and the rollout's log-probabilities"),
    _row("openrlhf.models.utils", "compute_reward", None, TRAINING, "sha:548aa0341385",
        "clip, KL penalty, the response's last token"),
    _row(_DEEPSPEED, "DeepspeedStrategy.save_model", None, "perturbation", "sha:14c67be849f9",
        "saves by save_pretrained, which writes learned parameters to a file of their own"),
    _row(_ACTOR, "ActorPPOTrainer.broadcast_to_vllm", None, "lora", "sha:a7ed79f664d6",
        "sends PEFT's names, which vLLM does not know; with adapters lora_sync.py sends merged weights in its place"),
    _row(_WRAP, "WorkerWrap.update_weight", None, "lora", "(self, name, dtype, shape, empty_cache)",
        "receives one weight over NCCL"),
    _row(_WRAP, "WorkerWrap.update_weight_cuda_ipc", None, "lora",
        "(self, name, dtype, shape, ipc_handles, empty_cache)", "receives one weight by a CUDA IPC handle"),
    _row(_PEFT, "Linear.get_delta_weight", None, "lora", "sha:acb338a1c897",
        "what an adapter adds to a linear layer; merged weights repeat it in float32", "peft 0.21.2"),
    _row(_PEFT, "Embedding.get_delta_weight", None, "lora", "sha:a3cb6607347b",
        "what an adapter adds to an embedding", "peft 0.21.2"),
    _row("openrlhf.utils.agent", "SingleTurnAgentExecutor.execute", None, TRAINING, "sha:e557741c5553",
        "calls generate() once per turn and returns mm_train_inputs in its response; swallows a reward's errors"),
    _row("openrlhf.utils.agent", "SingleTurnAgentExecutor._fetch_rewards_via_http", None, TRAINING, "sha:5e4b159ffa54",
        "requests a reward from a server; ours checks what it answers"),
    _row("openrlhf.utils.vlm_utils", "dedup_media_tokens", None, _DRAWN, "sha:c80d6c853f57",
        "a prompt with pictures as the engine takes it"),
    _row(f"vllm.{_RUNNER_V1}", "GPUModelRunner.reload_weights", None, "cpu",
        "(self, weights_iterator, weights_path, is_checkpoint_format)",
        "takes the weights; plain load_weights fails on CPU, where linear weights are repacked", "vllm 0.29.0"),
    _row("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod._setup_kernel",
        None, "cpu", "(self, layer, w13, w2)", "packs a CPU's experts at the first load alone", "vllm 0.29.0"),
)

# The parameter names fit all releases of VLLM_OF_ROLLOUTS.
VLLM: tuple[Patch, ...] = (
    # ---- an engine's configuration and requests -----------------------------------------------------
    _vllm("engine.arg_utils", "EngineArgs.create_engine_config", "plugin:checked_config", "(self, ...)",
        "the spec and its combinations are checked in the caller's process, before any model loads", IN_VLLM),
    _vllm("config.vllm", "VllmConfig.compute_hash", "plugin:hash_without_seed", "(self...)",
        "engines with different seeds share their compiled graphs"),
    _vllm("v1.engine.input_processor", "InputProcessor.process_inputs", "request_arguments:checked_request",
        "(self, request_id, prompt, params, ..., resumable...)", "a bad argument is the caller's error"),
    _vllm("v1.engine.parallel_sampling", "ParentRequest._get_child_sampling_params",
        "request_arguments:numbered_children", "(self, index)", "each of n samples is another trajectory"),
    _vllm("v1.engine.output_processor", "OutputProcessor._finish_request", "records:keep_length",
        "(self, req_state)", "only the front end sees where a response ends at a stop string"),
    _vllm("v1.engine.llm_engine", "LLMEngine.__init__", "records:with_lengths", "(self, ...)",
        "the front end of an engine that perturbs keeps these lengths"),
    _vllm("v1.engine.async_llm", "AsyncLLM.__init__", "records:with_lengths", "(self, ...)", "the same"),
    _vllm("v1.engine.llm_engine", "LLMEngine.abort_request", "records:drop_aborted", "(self, request_ids, ...)",
        "the records of aborted requests are dropped"),
    _vllm("v1.engine.async_llm", "AsyncLLM.abort", "records:drop_aborted_async", "(self, request_id, ...)", "the same"),
    _vllm("v1.engine.core_client", "DPLBAsyncMPClient.call_utility_async", "plugin:answers_of_every_rank",
        "(self, method)", "vLLM returns the first data-parallel rank's results only"),
    _vllm("v1.engine.core_client", "AsyncMPClient._call_utility_async", None, "(self, method, engine)",
        "asks one rank"),
    # ---- an engine's core ---------------------------------------------------------------------------
    _vllm(_CORE, "EngineCore.__init__", "startup_check:checked_core", "(self, vllm_config, ...)",
        "the start-up check runs at its end; the scheduler's block hashes are in its process"),
    _vllm(_CORE, "EngineCore.add_request", "startup_check:checked_first", "(self, ...)",
        "the first request after a weight sync follows the check that is due"),
    _vllm(_CORE, "EngineCore.collective_rpc", "startup_check:with_calls_of_core", "(self, method, ...)",
        "calls that concern the core and not its workers"),
    _vllm(_CORE, "EngineCore.preprocess_add_request", None, "(self, request)", "the check makes requests of its own"),
    _vllm(_CORE, "EngineCore.post_step", None, "(self, model_executed)", "and runs them by step_fn and post_step"),
    _vllm(_CORE, "EngineCore.reset_prefix_cache", None, "(self, ...)", "and leaves no block behind"),
    _vllm("v1.core.sched.scheduler", "Scheduler.set_pause_state", None, "(self, pause_state)",
        "a paused engine is checked too"),
    _vllm("v1.core.kv_cache_utils", "generate_block_hash_extra_keys", "request_arguments:with_trajectory_keys",
        "(request, start_token_idx, end_token_idx, start_mm_idx)", "perturbed blocks belong to their trajectory",
        IN_PERTURBED_CORE),
    _vllm("v1.core.block_pool", "generate_block_hash_extra_keys", "request_arguments:with_trajectory_keys",
        "import", "holds the function under a name of its own", IN_PERTURBED_CORE),
    # ---- a worker and its weights -------------------------------------------------------------------
    _vllm("v1.worker.worker_base", "WorkerBase", "plugin:with_procedures", "class", "gains perturbation_* procedures"),
    _vllm(_WORKER, "Worker.load_model", "plugin:attached", "(self, ...)", "attached before anything is compiled"),
    _vllm(_WORKER, "Worker.finish_weight_update", "plugin:after_update", "(self)",
        "sparse and sharded transfers write parameters directly, past load_weights"),
    _vllm(_WORKER, "Worker.sleep", "plugin:after_sleep", "(self, level)", "the weights leave the memory"),
    _vllm(_WORKER, "Worker.wake_up", "plugin:after_wake_up", "(self, tags)", "the weights are back"),
    _vllm("model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding.forward", None,
        "(self, input_)", "the override is a subclass of the input embedding's class"),
    _vllm("model_executor.layers.vocab_parallel_embedding", "ParallelLMHead", None, "class",
        "the output matrix, where a model has one of its own"),
    _vllm("model_executor.layers.logits_processor", "LogitsProcessor.forward", None,
        "(self, lm_head, hidden_states, ...)", "receives the last hidden states"),
    _vllm("model_executor.layers.fused_moe.runner.moe_runner", "MoERunner.is_monolithic", None, "(self)",
        "says whether a layer's kernel chooses experts inside"),
    _vllm("model_executor.layers.fused_moe.router.base_router", "BaseRouter.set_capture_fn", None,
        "(self, capture_fn)", "hands over the experts that a layer chose"),
    # ---- the two model runners; runners.py replaces bound methods --------------------
    _vllm(_RUNNER_V1, "GPUModelRunner._update_states", None, "(self, scheduler_output)", "requests come and go"),
    _vllm(_RUNNER_V1, "GPUModelRunner._preprocess", None, "(self, scheduler_output, ...)", "inputs are laid out"),
    _vllm(_RUNNER_V1, "GPUModelRunner.profile_run", None, "(self)", "a weight sync's memory is measured with it"),
    _vllm("v1.sample.sampler", "Sampler.sample", None, "(self, logits, sampling_metadata, logprobs_mode_override)",
        "tokens are drawn"),
    _vllm("v1.sample.sampler", "Sampler.compute_logprobs", None, "(logits)", "called for processed_logprobs"),
    _vllm("v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p", None, "(logits, k, p...)", "called by both"),
    _vllm(_RUNNER_V2, "GPUModelRunner.add_requests", None, "(self, scheduler_output)", "requests come and go"),
    _vllm(_RUNNER_V2, "GPUModelRunner.prepare_inputs", None, "(self, scheduler_output, ...)", "inputs are laid out"),
    _vllm(_RUNNER_V2, "GPUModelRunner.profile_run", None, "(self)", "a weight sync's memory is measured with it"),
    _vllm(f"{_SAMPLER_V2}.sampler", "Sampler.sample", None,
        "(self, logits, expanded_idx_mapping, ...idx_mapping_np, ...)", "tokens are drawn"),
    _vllm(f"{_SAMPLER_V2}.sampler", "Sampler.apply_sampling_params", None,
        "(self, logits, expanded_idx_mapping, ...idx_mapping_np, ..., skip_top_k_top_p)", "called with sample's rows"),
    _vllm(f"{_SAMPLER_V2}.states", "SamplingStates.apply_min_p", None,
        "(self, logits, expanded_idx_mapping, idx_mapping_np)", "called after the perturbation has seen the logits"),
    _vllm(f"{_SAMPLER_V2}.states", "SamplingStates.any_greedy", None, "(self, idx_mapping_np)", "called"),
    _vllm(f"{_SAMPLER_V2}.states", "SamplingStates.get_top_k_top_p", None,
        "(self, expanded_idx_mapping, idx_mapping_np)", "called; returns top_k and top_p"),
)

# Nothing of verl is replaced: its classes are subclassed and its functions relied upon.
VERL: tuple[Patch, ...] = (
    _verl(_BASE, "PPOTrainer._init_resource_pool_mgr", "493680a47259", "ours puts our workers in"),
    _verl(_BASE, "PPOTrainer._compute_old_log_prob", "47e705af8fb4", "ours sends the spec along, and measures"),
    _verl(_BASE, "PPOTrainer._compute_ref_log_prob", "647f0c685c99", "ours sends the spec along"),
    _verl(_BASE, "PPOTrainer._update_actor", "61e4a008610f", "ours sends the spec along, and collects the metrics"),
    _verl(_BASE, "PPOTrainer._step_once", "0555717c3378", "the order of these"),
    _verl(_BASE, "register_trainer", "39c894aab481", "the trainer's mode"),
    _verl(_SYNC, "PPOTrainerSync", "3a7430396064",
        "stays as it is; ours is registered in addition. No request runs while weights change",
        "ngrpo.trainers.verl.entry_point:registered"),
    _verl("trainer.main_ppo", "TaskRunnerV1.init_agent_loop_manager", "db9691ea6fc9", "the class is configured"),
    _verl("utils.transferqueue_utils", "_async_meta_to_realdata", "4e3fcdf17e9a", "workers get fields and extra_info"),
    _verl(_PADDING, "construct_minimal_padding_template", "8da2149e76c4", "padding copies a sample's record"),
    _verl(_PADDING, "upsample_batch_to_divisible_size", "712c98ce70fa", "and has a name that says so"),
    _verl(_LOOP_TQ, "AgentLoopManagerTQ", "2c2014d24f19", "ours starts our workers"),
    _verl(_LOOP_TQ, "AgentLoopWorkerTQ", "ae2ea55ee53a", "a sample has its response's extra_fields"),
    _verl(f"{_LOOP}.agent_loop", "AgentLoopWorker._run_agent_loop", "8a23de688a00", "ours says which trajectory it is"),
    _verl(f"{_LOOP}.agent_loop", "AgentLoopOutput.as_dict", "a83678f37801", "hands extra_fields on"),
    _verl(f"{_LOOP}.single_turn_agent_loop", "SingleTurnAgentLoop.run", "765c85c59168", "hands both on"),
    _verl("workers.rollout.llm_server", "LLMServerClient.generate", "7b2e51213e60", "hands both on"),
    _verl("workers.rollout.replica", "RolloutReplicaRegistry", "25b47c8795c6", "our replica takes vLLM's place"),
    _verl("workers.rollout.replica", "TokenOutput", "066146a29165", "has extra_fields"),
    _verl(_SERVER, "vLLMHttpServer.run_server", "e2bd34e512d9", "ours has the engine confirm its perturbation"),
    _verl(_SERVER, "vLLMHttpServer.generate", "98d1b7a3a17b", "ours picks up the record"),
    _verl(_SERVER, "vLLMHttpServer._get_worker_extension_cls", "3d69431647e9", "ours ends a weight sync"),
    _verl(_SERVER, "vLLMReplica.__init__", "c1720aaf7610", "ours starts our server"),
    _verl("workers.rollout.vllm_rollout.utils", "vLLMColocateWorkerExtension", "ee243df2600d", "ends a weight sync"),
    _verl("workers.engine.base", "EngineRegistry", "54452eee1279", "a vendor's engine goes before the device's"),
    _verl(_FSDP, "FSDPEngineWithLMHead.prepare_model_inputs", "2652efd0aee1", "right-padded rows, or packed ones"),
    _verl(_FSDP, "FSDPEngineWithLMHead.prepare_model_outputs", "384ab09aab7b", "ours puts densities in"),
    _verl(_FSDP, "FSDPEngineWithLMHead.forward_step", "d2fa75d4cdf9", "ours replays"),
    _verl(_FSDP, "FSDPEngine._build_fsdp_module", "980b7d8b72c1", "on a CPU ours offloads nothing"),
    _verl(_WORKERS, "ActorRolloutRefWorker.init_model", "61d59571adb3", "actor and reference are registered engines"),
    _verl(_WORKERS, "TrainingWorker.infer_batch", "24e5308887fd", "hands all outputs on"),
    _verl("workers.utils.losses", "ppo_loss", "d7a7f4ab82c8", "takes log_probs of the outputs"),
)
# fmt: on


def active(conditions: Iterable[str]) -> tuple[Patch, ...]:
    """Returns the rows of the conditions that hold, in the order of the table."""
    held = frozenset(conditions)
    return tuple(row for row in (*OPENRLHF, *VLLM, *VERL) if not held.isdisjoint(row.when.split(" or ")))


def install(conditions: Iterable[str]) -> None:
    """Applies the active rows, now for modules already imported and on import for the others."""
    place(active(conditions))


def check(rows: Sequence[Patch]) -> None:
    """Compares rows with the installed sources, without importing them.

    Raises:
        PatchMismatch: one error that lists every row that does not match, expected and found.
    """
    wrong = [(row, state) for row in rows if (state := row.state()) != row.upstream]
    if not wrong:
        return
    lines = [f"{len(wrong)} of {len(rows)} upstream patches do not match the installed packages:"]
    for row, state in wrong:
        top = row.module.partition(".")[0]
        package = packages_distributions().get(top, [top])[0]
        release = installed(package)
        there = f"{package} {release}" if release else f"{top} is not installed"
        use = f"replaced by {row.ours}" if row.ours else "relied upon"
        lines += [f"  {row.target}", f"    expected {row.upstream} ({row.checked}), found {state} ({there})"]
        lines += [f"    {use}: {row.why}"]
    releases = ", ".join(sorted({row.checked for row, _ in wrong}))
    lines += [
        f"Install the checked release ({releases}), or read the new source, adapt ours and enter the new state in"
        " ngrpo/patches.py, as python -m ngrpo.patches prints it."
    ]
    raise PatchMismatch("\n".join(lines))


def main(argv: Sequence[str] = (), write: Callable[[str], object] = print) -> int:
    """Prints the rows of every package that is there with the states found; returns 1 if one does not match."""
    root = Path(argv[0]) if argv else None
    wrong = 0
    for row in (*OPENRLHF, *VLLM, *VERL):
        if source_of(row.module.partition(".")[0], root) is None:
            continue
        state = row.state(root)
        wrong += state != row.upstream
        mark = "ok " if state == row.upstream else "NOT"
        write(f"{mark} [{row.when}] {row.target} -> {row.ours}: {row.why} ({row.checked}: {state})")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
