# SPDX-License-Identifier: Apache-2.0
"""Upstream patches: one table of the code in OpenRLHF, vLLM, verl, Ray, torch that is replaced, relied upon or called.

Upstream stays unmodified on disk. A row names the upstream definition, our replacement, the condition, the reason, and
the state of the upstream source that it was written against. `ngrpo.machine.upstream.patch_check` compares that state
with the installed sources before anything starts, so an upgrade that changes one of them is one clear error, and not a
run that trains on something else. ``python -m ngrpo.patches [FOLDER]`` prints the table and the states found, installed
or in a folder with the sources of another release.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ngrpo.machine.upstream.patch import IMPORT, Patch, place, source_of
from ngrpo.machine.upstream.versions import VLLM_OF_ROLLOUTS

_OPENRLHF = "openrlhf 0.11.2"
_ACTOR = "openrlhf.trainer.ray.ppo_actor"
_LAUNCHER = "openrlhf.trainer.ray.launcher"
_ENGINE = "openrlhf.trainer.ray.vllm_engine"
_ASYNC = "openrlhf.trainer.ppo_trainer_async"
_SAMPLES = "openrlhf.trainer.ppo_utils.samples_generator"
_EXPERIENCE = "openrlhf.trainer.ppo_utils.experience_maker"
_MODEL = "openrlhf.models.actor"
_DEEPSPEED = "openrlhf.utils.deepspeed.deepspeed"
_WRAP = "openrlhf.trainer.ray.vllm_worker_wrap"
_PEFT = "peft.tuners.lora.layer"
_TRAINERS = "ngrpo.trainers.openrlhf"
_HARDWARE = "ngrpo.machine.hardware"
TRAINING = "training"
"""The condition of every run of `ngrpo train`."""

IN_VLLM = "vllm"
"""The condition of every process of any vLLM."""
IN_SUPPORTED_VLLM = "supported_vllm"
"""The condition of every process of a supported vLLM."""
IN_PERTURBED_CORE = "perturbed_vllm"
"""The condition of the core of an engine that perturbs."""
VLLM_CONDITIONS = (IN_VLLM, IN_SUPPORTED_VLLM, IN_PERTURBED_CORE)
_WORKER = "v1.worker.gpu_worker"
_CORE = "v1.engine.core"
_RUNNER_V1 = "v1.worker.gpu_model_runner"
_RUNNER_V2 = "v1.worker.gpu.model_runner"
_SAMPLER_V2 = "v1.worker.gpu.sample"

_LOOP = "experimental.agent_loop"
_BASE = "trainer.ppo.v1.trainer_base"
_SYNC = "trainer.ppo.v1.trainer_sync"
_LOOP_TQ = "trainer.ppo.v1.agent_loop_tq"
_SERVER = "workers.rollout.vllm_rollout.vllm_async_server"
_PADDING = "trainer.ppo.padding_utils"
_FSDP = "workers.engine.fsdp.transformer_impl"
_WORKERS = "workers.engine_workers"


def _row(
    module: str, name: str, ours: str | None, when: str, upstream: str, why: str, checked: str = _OPENRLHF
) -> Patch:
    """A row for what OpenRLHF's trainer uses."""
    return Patch(module=module, attribute=name, ours=ours, when=when, upstream=upstream, checked=checked, why=why)


def _vllm(module: str, name: str, ours: str | None, upstream: str, why: str, when: str = IN_SUPPORTED_VLLM) -> Patch:
    """A row for vLLM; ``module`` is relative to ``vllm``, and ``ours`` to `ngrpo.rollout`."""
    return Patch(
        module=f"vllm.{module}",
        attribute=name,
        ours=None if ours is None else f"ngrpo.rollout.{ours}",
        when=when,
        upstream=upstream,
        checked=f"vllm {VLLM_OF_ROLLOUTS}",
        why=why,
    )


def _verl(module: str, name: str, digest: str, why: str, ours: str | None = None) -> Patch:
    """A row for verl; ``module`` is relative to ``verl``, ``digest`` is of the source (see `Patch.upstream`)."""
    return Patch(
        module=f"verl.{module}",
        attribute=name,
        ours=ours,
        when="verl",
        upstream=f"sha:{digest}",
        checked="verl 0.9.1",
        why=why,
    )


# fmt: off
OPENRLHF: tuple[Patch, ...] = (
    # ---- a machine without CUDA -------------------------------------------------------------------
    _row("torch.cuda", "current_device", f"{_HARDWARE}.cpu:cuda_current_device", "cpu", "()",
        "OpenRLHF moves batches to torch.cuda.current_device(), which raises an error without CUDA.", "torch 2.13.0"),
    _row("torch.cuda", "set_device", f"{_HARDWARE}.cpu:do_nothing", "cpu", "(device)",
        "DeepspeedStrategy.setup_distributed chooses a CUDA device, and there is none.", "torch 2.13.0"),
    _row("torch.cuda", "synchronize", f"{_HARDWARE}.cpu:do_nothing", "cpu", "(device)",
        "torch_dist_barrier_and_cuda_sync waits for a CUDA device, and there is none.", "torch 2.13.0"),
    _row(_DEEPSPEED, "init_device_mesh", f"{_HARDWARE}.cpu:device_mesh", "cpu", "import",
        'DeepspeedStrategy asks for a device mesh on "cuda".'),
    _row("openrlhf.trainer.ppo_utils.replay_buffer", "NaiveReplayBuffer.__init__",
        f"{_HARDWARE}.cpu:replay_buffer_init", "cpu", "sha:ee37108b4b5d", 'It moves samples to "cuda:{index}".'),
    _row("deepspeed.comm.torch", "build_shm_op", f"{_HARDWARE}.cpu:do_nothing", "cpu", "()",
        "DeepSpeed compiles an all-reduce kernel for half a minute, and gloo has one already.", "deepspeed 0.19.6"),
    _row("deepspeed.comm.torch", "TorchBackend.all_gather_into_tensor", f"{_HARDWARE}.cpu:waited_for", "cpu",
        "(self, output_tensor, input_tensor, group, async_op)",
        "Of several gathers DeepSpeed waits for the last only, and gloo finishes them in any order.",
        "deepspeed 0.19.6"),
    # ---- float32 on a CPU -------------------------------------------------------------------------
    _row("argparse", "_ActionsContainer.add_argument", "ngrpo.machine.upstream.openrlhf_flags:with_float32", "cpu",
        "(self)",
        "OpenRLHF's --ds.param_dtype takes bf16 and fp16 only, and models on a CPU compute in float32.", "Python 3.12"),
    _row("openrlhf.utils.utils", "convert_to_torch_dtype", f"{_HARDWARE}.cpu:with_float32", "cpu", "sha:9c59d2aa5133",
        "OpenRLHF loads models in bf16 or fp16 only."),
    _row(_DEEPSPEED, "get_train_ds_config", f"{_HARDWARE}.cpu:with_torch_adam", "cpu", "import",
        "DeepSpeed compiles an Adam of its own for one to two minutes, and PyTorch has one already."),
    # ---- CUDA -------------------------------------------------------------------------------------
    _row(_DEEPSPEED, "get_train_ds_config", f"{_HARDWARE}.cuda:with_available_adam", "any_adam", "import",
        "DeepSpeed compiles an Adam of its own, which may fail; PyTorch's Adam then takes its place."),
    # ---- without flash-attn (see ngrpo.machine.hardware.stand_ins) ----------------------------------------
    _row("openrlhf.models.ring_attn_utils", IMPORT, f"{_HARDWARE}.stand_ins:flash_attn_stand_in", "without_flash_attn",
        "import", "The module imports flash_attn, although only packed samples need it."),
    _row("openrlhf.utils", "get_strategy", f"{_HARDWARE}.stand_ins:attention_as_given", "without_flash_attn", "import",
        "OpenRLHF asks for flash_attention_2 where samples are packed, whatever --ds.attn_implementation says."),
    _row("openrlhf.models.utils", "log_probs_from_logits", "ngrpo.trainers.common.log_probs:without_flash_attn",
        "without_flash_attn", "sha:25bc663769cb", "It makes a gradient as large as all logits every 1,024 rows."),
    _row(_LAUNCHER, "BaseDistributedActor._get_free_port", f"{_HARDWARE}.processes:port_below_outgoing", TRAINING,
        "sha:2e43720d4972",
        "OpenRLHF chooses a port long before it listens there, and an outgoing connection may have taken it by then."),
    _row("torch.utils.file_baton", "FileBaton.try_acquire", f"{_HARDWARE}.build_locks:without_stale_lock", TRAINING,
        "(self)",
        "A build that was killed leaves its lock behind, and the next run would wait for it forever.", "torch 2.13.0"),
    # ---- the classes of OpenRLHF, one subclass each -----------------------------------------------
    _row("openrlhf.trainer.ppo_trainer", "PPOTrainer", f"{_TRAINERS}.trainer:trainer", TRAINING, "sha:74b355e75a15",
        "Our trainer adds measures to the step's log and states to the checkpoint, and sets the noise and temperature"
        " of each step."),
    _row(_ASYNC, "TrainingActor", f"{_TRAINERS}.async_trainer:training_actor", TRAINING, "sha:ad079d89d655",
        "The asynchronous trainer does the same as ours, leaves out rollouts that are too old, and evaluates."),
    _row(_ASYNC, "GenerateSamplesActor", f"{_TRAINERS}.async_trainer:generate_samples_actor", TRAINING,
        "sha:330319997ada",
        "In an asynchronous run the trainer gets the number of steps, and a checkpoint the round, from the sampling"
        " actor. OpenRLHF's evaluates itself, never the last steps."),
    _row(_ASYNC, "PPOTrainerAsync", f"{_TRAINERS}.async_trainer:async_trainer", TRAINING, "sha:401419040f91",
        "The trainer gets from the sampling actor what it needs to evaluate."),
    _row("openrlhf.trainer.ppo_trainer", "prepare_datasets", f"{_TRAINERS}.trainer:prepare_datasets", "reproducible",
        "(strategy, tokenizer)", "With --reproducible the order of the prompts follows the seed."),
    _row("openrlhf.trainer.ppo_trainer", "blending_datasets", f"{_TRAINERS}.prompt_rows:blending_datasets", TRAINING,
        "import",
        "`datasets` changes labels to the type of their column; our reader, which evaluation uses too, does not."),
    _row("openrlhf.datasets.prompts_dataset", "preprocess_data", f"{_TRAINERS}.trainer:preprocess_data",
        "chat_template", "sha:1a21ceede6e1",
        "One function renders conversations, tools and template arguments, in training and in evaluation."),
    _row(_SAMPLES, "SamplesGenerator", f"{_TRAINERS}.samples_generator:samples_generator", TRAINING,
        "sha:11458b2545a7",
        "Requests carry the round, the filters of sampling and the temperature, and a batch reaches idle engines as a"
        " whole. Scores beyond the scale of dynamic filtering are said."),
    _row(_ENGINE, "RolloutRayActor", f"{_TRAINERS}.rollout_actor:rollout_actor", TRAINING, "sha:6bda23ee4983",
        "Ours checks rewards, gives the engine the spec, requests their seeds and responses their records, and can load"
        " weights from a file."),
    _row(_EXPERIENCE, "RemoteExperienceMaker", f"{_TRAINERS}.experience_maker:experience_maker", TRAINING,
        "sha:351a52599ac6", "Ours measures the rollouts and computes our advantages."),
    _row(_EXPERIENCE, "compute_reward", f"{_TRAINERS}.step_advantages:compute_reward", TRAINING, "import",
        "Our advantages take the place of the rewards of each micro-batch."),
    _row(_ACTOR, "PolicyModelActor", f"{_TRAINERS}.model_actors:policy_model_actor", TRAINING, "sha:8d664f8c8592",
        "The actor's log-probabilities are of the replayed inputs, and among the tokens that sampling left. It drops"
        " the rollouts of --critic.freezing_steps."),
    _row(_LAUNCHER, "ReferenceModelActor", f"{_TRAINERS}.model_actors:reference_model_actor",
        "perturbation or sampling_mask or routing", "sha:871e4cda19c1",
        "The reference model's log-probabilities are those of the replayed inputs too, through its own embedding."),
    _row(_ACTOR, "ActorPPOTrainer", f"{_TRAINERS}.actor_trainer:actor_trainer", TRAINING, "sha:afd1137caf53",
        "The forward that is differentiated replays the rollout; the loss has our terms; the weight sync may add"
        " noise."),
    _row("openrlhf.trainer.ray.ppo_critic", "CriticPPOTrainer", f"{_TRAINERS}.short_steps:critic_trainer", TRAINING,
        "sha:e67a52dc27a2", "The critic leaves out what fills no batch too, and shuffles by its count of updates."),
    # ---- functions around them --------------------------------------------------------------------
    _row(_DEEPSPEED, "DeepspeedStrategy.moving_average", f"{_TRAINERS}.moving_average:moving_average", "moving_average",
        "sha:a76aee0620b4",
        "In bfloat16 an average rounds small differences away and stays at the initial model; ours is in float32."),
    _row("openrlhf.models.model", "_get_reward_model", f"{_TRAINERS}.reward_model:checked_reward_model", TRAINING,
        "sha:b1c2c94d82b1",
        "transformers initialises a head that a reward model's files lack at random, and the run would train on it."),
    _row("openrlhf.models.model", "get_llm_for_sequence_regression", f"{_TRAINERS}.reward_model:with_compared_tokens",
        TRAINING, "sha:e5ec1d560371", "A hub model is here once it has loaded, and then its tokens are compared. It"
        " calls from_pretrained of _get_reward_model's class, and prefers a config.json's value_head_prefix."),
    _row(_MODEL, "Actor.__init__", f"{_TRAINERS}.model_actors:actor_init", "perturbation", "sha:ed617cb47dde",
        "A perturbation's learned parameters join the model before DeepSpeed wraps it."),
    _row(_MODEL, "Actor.__init__", f"{_TRAINERS}.lora_sync:checked_actor", "lora", "sha:ed617cb47dde",
        "A merged weight cannot stand for every kind of adapter; those that it cannot stand for are an error at once."),
    _row(_DEEPSPEED, "DeepspeedStrategy.save_model", f"{_TRAINERS}.lora_sync:save_model", "lora", "sha:14c67be849f9",
        "OpenRLHF saves a folder that looks like a model without weights; ours is as PEFT saves it, with the adapter"
        " alone gathered."),
    _row(_DEEPSPEED, "DeepspeedStrategy._get_model_parameters", f"{_TRAINERS}.model_actors:get_model_parameters",
        "perturbation", "sha:c6c4dad36a87",
        "A perturbation's learned parameters may have a learning rate of their own."),
    _row(_MODEL, "log_probs_from_logits", "ngrpo.trainers.common.log_probs:with_overrides",
        "perturbation or sampling_mask or credit_in_loss", "import",
        "Log-probabilities are among the tokens that sampling left, or a density's; a credit reads the logits."),
    _row("openrlhf.utils.vlm_utils", "merge_mm_train_inputs", f"{_TRAINERS}.model_actors:merge_mm_train_inputs",
        "perturbation or sampling_mask or routing or second_round", "sha:adfa2c8a4cd8",
        "The forward of a multimodal model gets its pictures without our records, which travel beside them."),
    # ---- relied upon, not replaced ----------------------------------------------------------------
    _row("openrlhf.datasets.utils", "blending_datasets", None, TRAINING, "sha:3a7604eb8f88",
        "Our reader follows how it reads names of datasets, and in which order it joins or draws from several."),
    _row(_ASYNC, "VLLMLock", None, TRAINING, "sha:b95090e0aed7",
        "Rollouts and evaluations of an asynchronous run exclude each other by such a lock."),
    _row("openrlhf.trainer.ppo_trainer", "compute_eval_metrics", None, TRAINING, "sha:6bacef13e26a",
        "An asynchronous run's evaluation calls it with what OpenRLHF gives it."),
    _row("openrlhf.trainer.ppo_trainer", "prepare_datasets", None, TRAINING, "sha:55832fcd023e",
        "It uses the length and the method select of what our blending_datasets returns."),
    _row("openrlhf.datasets.prompts_dataset", "PromptDataset", None, TRAINING, "sha:c67a76171e1f",
        "It goes through our rows once, and each is a dictionary."),
    _row(_MODEL, "Actor.forward", None, "perturbation or sampling_mask or credit", "sha:65d2a2a0e02a",
        "It calls log_probs_from_logits once, with all rows of the logits divided by the temperature, and returns"
        " their entropy."),
    _row("openrlhf.models.loss", "PolicyLoss.forward", None, "second_round or credit_in_loss", "sha:e0e040c83640",
        "Our loss terms rely on how it uses log-probabilities, advantages and the rollout's log-probabilities."),
    _row("openrlhf.models.utils", "compute_reward", None, TRAINING, "sha:548aa0341385",
        "It clips the reward, subtracts the KL penalty and puts the reward at the response's last token."),
    _row("openrlhf.trainer.ppo_utils.length_penalty", "apply_length_penalties", None, TRAINING, "sha:d5d6d7ff6bbd",
        "It changes the rewards alone, in place; we call it on copies, for the rewards that our advantages compare."),
    _row(_DEEPSPEED, "DeepspeedStrategy.save_model", None, "perturbation", "sha:14c67be849f9",
        "It saves by save_pretrained, which writes learned parameters to a file of their own."),
    _row(_ACTOR, "ActorPPOTrainer.broadcast_to_vllm", None, "lora", "sha:a7ed79f664d6",
        "It sends PEFT's names, which vLLM does not know; with adapters lora_sync.py sends merged weights instead."),
    _row(_WRAP, "WorkerWrap.update_weight", None, "lora", "(self, name, dtype, shape, empty_cache)",
        "It receives one weight over NCCL."),
    _row(_WRAP, "WorkerWrap.update_weight_cuda_ipc", None, "lora",
        "(self, name, dtype, shape, ipc_handles, empty_cache)", "It receives one weight by a CUDA IPC handle."),
    _row(_PEFT, "Linear.get_delta_weight", None, "lora", "sha:acb338a1c897",
        "It is what an adapter adds to a linear layer; merged weights repeat it in float32.", "peft 0.21.2"),
    _row(_PEFT, "Embedding.get_delta_weight", None, "lora", "sha:a3cb6607347b",
        "It is what an adapter adds to an embedding.", "peft 0.21.2"),
    _row("openrlhf.utils.agent", "SingleTurnAgentExecutor.execute", None, TRAINING, "sha:e557741c5553",
        "It calls generate() once in a turn, returns mm_train_inputs in its response and, without reward_endpoints,"
        " asks for no reward: rewards.py asks."),
    _row("openrlhf.utils.agent", "SingleTurnAgentExecutor._fetch_rewards_via_http", None, TRAINING, "sha:5e4b159ffa54",
        "We send a reward server what it sends."),
    _row("openrlhf.utils.agent", "MultiTurnAgentExecutor.execute", None, TRAINING, "sha:222ed1020823",
        "It makes an agent of agent_instance_cls for each response, and calls rewards.item() of each step."),
    _row("openrlhf.utils.vlm_utils", "dedup_media_tokens", None,
        "perturbation or reproducible or sampling_mask or sampling_schedule or routing", "sha:c80d6c853f57",
        "It makes a prompt with pictures as the engine accepts it."),
    _row(f"vllm.{_RUNNER_V1}", "GPUModelRunner.reload_weights", None, "cpu",
        "(self, weights_iterator, weights_path, is_checkpoint_format)",
        "It loads weights into repacked layers; load_weights fails on a CPU, where vLLM repacks linear weights.",
        "vllm 0.29.0"),
    _row("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod._setup_kernel",
        None, "cpu", "(self, layer, w13, w2)", "It packs experts for a CPU at the first load only.", "vllm 0.29.0"),
)

# The parameter names fit all releases of VLLM_OF_ROLLOUTS.
VLLM: tuple[Patch, ...] = (
    # ---- an engine's configuration and requests -----------------------------------------------------
    _vllm("engine.arg_utils", "EngineArgs.create_engine_config", "plugin:checked_config", "(self, ...)",
        "The spec and its combinations are checked in the caller's process, before any model loads.", IN_VLLM),
    _vllm("config.vllm", "VllmConfig.compute_hash", "plugin:hash_without_seed", "(self...)",
        "vLLM hashes the seed too; without it engines with different seeds share their compiled graphs."),
    _vllm("v1.engine.input_processor", "InputProcessor.process_inputs", "request_arguments:checked_request",
        "(self, request_id, prompt, params, ..., resumable...)",
        "A bad argument of a request is an error of its caller, and not of the engine's core."),
    _vllm("v1.engine.parallel_sampling", "ParentRequest._get_child_sampling_params",
        "request_arguments:numbered_children", "(self, index)",
        "Each of the n samples of a request is a trajectory with a seed of its own."),
    _vllm("v1.engine.output_processor", "OutputProcessor._finish_request", "records:keep_length",
        "(self, req_state)", "Only the front end sees where a response ends at a stop string."),
    _vllm("v1.engine.llm_engine", "LLMEngine.__init__", "records:with_lengths", "(self, ...)",
        "The front end of an engine that perturbs keeps the lengths of responses that ended at a stop string."),
    _vllm("v1.engine.async_llm", "AsyncLLM.__init__", "records:with_lengths", "(self, ...)",
        "The asynchronous front end keeps these lengths too."),
    _vllm("v1.engine.llm_engine", "LLMEngine.abort_request", "records:drop_aborted", "(self, request_ids, ...)",
        "The records of aborted requests are dropped."),
    _vllm("v1.engine.async_llm", "AsyncLLM.abort", "records:drop_aborted_async", "(self, request_id, ...)",
        "The records of aborted requests are dropped in the asynchronous engine too."),
    _vllm("v1.engine.core_client", "DPLBAsyncMPClient.call_utility_async", "plugin:results_of_every_rank",
        "(self, method)", "vLLM returns the results of the first data-parallel rank only, and records are on all."),
    _vllm("v1.engine.core_client", "AsyncMPClient._call_utility_async", None, "(self, method, engine)",
        "It asks one rank."),
    # ---- an engine's core ---------------------------------------------------------------------------
    _vllm(_CORE, "EngineCore._initialize_kv_caches", "startup_check:perturbed_core", "(self, vllm_config)",
        "Early in a core's start, and after vLLM has loaded plugins in its process, its block hashes are patched."),
    _vllm(_CORE, "EngineCore.__init__", "startup_check:checked_core", "(self, vllm_config, ...)",
        "The start-up check runs at its end."),
    _vllm(_CORE, "EngineCoreProc.run_busy_loop", "startup_check:checked_loop", "(self)",
        "In a process that was spawned, the start-up check runs here: its __init__ runs unpatched."),
    _vllm(_CORE, "EngineCore.add_request", "startup_check:checked_first", "(self, ...)",
        "A start-up check that is due runs before the next request to an idle engine."),
    _vllm(_CORE, "EngineCore.collective_rpc", "startup_check:with_calls_of_core", "(self, method, ...)",
        "Some of our calls concern the core and not its workers."),
    _vllm(_CORE, "EngineCore.preprocess_add_request", None, "(self, request)",
        "The start-up check makes requests of its own with it."),
    _vllm(_CORE, "EngineCore.post_step", None, "(self, model_executed)",
        "The start-up check runs its requests by step_fn and post_step."),
    _vllm(_CORE, "EngineCore.reset_prefix_cache", None, "(self, ...)",
        "The start-up check removes the blocks of its requests with it."),
    _vllm("v1.core.sched.scheduler", "Scheduler.set_pause_state", None, "(self, pause_state)",
        "The start-up check lifts the pause of a paused engine and sets it again."),
    _vllm("v1.core.kv_cache_utils", "generate_block_hash_extra_keys", "request_arguments:with_trajectory_keys",
        "(request, start_token_idx, end_token_idx, start_mm_idx)",
        "A block of the KV cache with perturbed inputs belongs to one trajectory.", IN_PERTURBED_CORE),
    _vllm("v1.core.block_pool", "generate_block_hash_extra_keys", "request_arguments:with_trajectory_keys",
        "import", "The module holds the function under a name of its own.", IN_PERTURBED_CORE),
    # ---- a worker and its weights -------------------------------------------------------------------
    _vllm("v1.worker.worker_base", "WorkerBase", "plugin:with_procedures", "class",
        "Workers gain the perturbation_* procedures, which engines call by name."),
    _vllm(_WORKER, "Worker.load_model", "plugin:attached", "(self, ...)",
        "The perturbation is attached before vLLM compiles anything."),
    _vllm(_WORKER, "Worker.finish_weight_update", "plugin:after_update", "(self)",
        "Sparse and sharded transfers write parameters directly, without load_weights."),
    _vllm(_WORKER, "Worker.sleep", "plugin:after_sleep", "(self, level)", "The weights leave the GPU's memory."),
    _vllm(_WORKER, "Worker.wake_up", "plugin:after_wake_up", "(self, tags)",
        "The weights are back in the GPU's memory."),
    _vllm("model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding.forward", None,
        "(self, input_)", "The override of inputs is a subclass of the input embedding's class."),
    _vllm("model_executor.layers.vocab_parallel_embedding", "ParallelLMHead", None, "class",
        "It is the output matrix of a model that does not share it with the input embedding."),
    _vllm("model_executor.layers.logits_processor", "LogitsProcessor.forward", None,
        "(self, lm_head, hidden_states, ...)", "It receives the last hidden states."),
    _vllm("model_executor.layers.fused_moe.runner.moe_runner", "MoERunner.is_monolithic", None, "(self)",
        "It says whether a layer's kernel chooses the experts itself, so that no router can hand them over."),
    _vllm("model_executor.layers.fused_moe.router.base_router", "BaseRouter.set_capture_fn", None,
        "(self, capture_fn)", "It hands over the experts that a layer chose."),
    # ---- the two model runners; runners.py replaces bound methods --------------------
    _vllm(_RUNNER_V1, "GPUModelRunner._update_states", None, "(self, scheduler_output)",
        "It adds requests to the batch and removes them."),
    _vllm(_RUNNER_V1, "GPUModelRunner._preprocess", None, "(self, scheduler_output, ...)",
        "It lays out the inputs of a step."),
    _vllm(_RUNNER_V1, "GPUModelRunner.profile_run", None, "(self...)",
        "vLLM measures its memory with it, and we add that of a weight sync."),
    _vllm("v1.sample.sampler", "Sampler.sample", None, "(self, logits, sampling_metadata, logprobs_mode_override)",
        "It draws the tokens."),
    _vllm("v1.sample.sampler", "Sampler.compute_logprobs", None, "(logits)",
        "We call it for vLLM's processed_logprobs."),
    _vllm("v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p", None, "(logits, k, p...)",
        "We call it as the samplers of both runners do."),
    _vllm(_RUNNER_V2, "GPUModelRunner.add_requests", None, "(self, scheduler_output)", "It adds requests."),
    _vllm(_RUNNER_V2, "GPUModelRunner.prepare_inputs", None, "(self, scheduler_output, ...)",
        "It lays out the inputs of a step."),
    _vllm(_RUNNER_V2, "GPUModelRunner.sample", None, "(self, hidden_states, input_batch, grammar_output)",
        "The graph of a step computes the logits where nothing changes them."),
    _vllm(_RUNNER_V2, "GPUModelRunner.profile_run", None, "(self...)",
        "vLLM measures its memory with it, and we add that of a weight sync."),
    _vllm(f"{_SAMPLER_V2}.sampler", "Sampler.add_request", None, "(self, req_idx,... sampling_params)",
        "It takes a request's parameters; we note for how many of its tokens they change the logits."),
    _vllm(f"{_SAMPLER_V2}.sampler", "Sampler.sample", None,
        "(self, logits, expanded_idx_mapping, ...idx_mapping_np, ...)", "It draws the tokens."),
    _vllm(f"{_SAMPLER_V2}.sampler", "Sampler.apply_sampling_params", None,
        "(self, logits, expanded_idx_mapping, ...idx_mapping_np, ..., skip_top_k_top_p)",
        "We call it with the rows of Sampler.sample."),
    _vllm(f"{_SAMPLER_V2}.states", "SamplingStates.apply_min_p", None,
        "(self, logits, expanded_idx_mapping, idx_mapping_np)",
        "We call it after the perturbation has read the logits."),
    _vllm(f"{_SAMPLER_V2}.states", "SamplingStates.any_greedy", None, "(self, idx_mapping_np)",
        "We ask it whether a request of the step decodes greedily."),
    _vllm(f"{_SAMPLER_V2}.states", "SamplingStates.max_num_logprobs", None, "(self, idx_mapping_np)",
        "We ask it whether a request wants log-probabilities, for which the logits stay outside the graph."),
    _vllm(f"{_SAMPLER_V2}.logprob", "LogprobTokenIdsState.max_num_token_ids", None, "(self, idx_mapping_np)",
        "We ask it whether a request of the step wants log-probabilities of tokens that it names."),
    _vllm(f"{_SAMPLER_V2}.states", "SamplingStates.get_top_k_top_p", None, "(self, ...)",
        "We read top_k and top_p of the step's rows as it does."),
)

# verl's classes are subclassed and its functions relied upon. Only its starts are replaced, by functions that check.
VERL: tuple[Patch, ...] = (
    _verl("utils.config", "validate_config", "9e2d82e4b51e",
        "A run with a perturbation and a trainer that would not perturb is refused.",
        "ngrpo.trainers.verl.entry_point:checked_config"),
    _verl("trainer.main_ppo", "run_ppo", "16cd2df01be6",
        "verl's other commands start their own runners with it, and these do not perturb.",
        "ngrpo.trainers.verl.entry_point:checked_start"),
    _verl(_BASE, "PPOTrainer._init_dataloader", "f45d901db25c", "Our trainer checks the datasets that it makes."),
    _verl(_BASE, "PPOTrainer._init_resource_pool_mgr", "493680a47259", "Our trainer puts our workers in."),
    _verl(_BASE, "PPOTrainer._compute_old_log_prob", "47e705af8fb4",
        "Our trainer sends the spec to the workers, and measures the mismatch."),
    _verl(_BASE, "PPOTrainer._compute_advantage", "723b42cbdaf4",
        "Its metrics compare token log-probabilities, which our trainer leaves out with a density."),
    _verl(_BASE, "PPOTrainer._compute_ref_log_prob", "647f0c685c99", "Our trainer sends the spec to the workers."),
    _verl(_BASE, "PPOTrainer._update_actor", "61e4a008610f",
        "Our trainer sends the spec to the workers, and collects their metrics."),
    _verl(_BASE, "PPOTrainer._step_once", "0555717c3378", "It calls these methods in an order that we rely on."),
    _verl(_BASE, "register_trainer", "39c894aab481", "It registers our trainer under the name of its mode."),
    _verl(_SYNC, "PPOTrainerSync", "3a7430396064",
        "Our trainer, a subclass, is registered in addition to it. No request runs while weights change.",
        "ngrpo.trainers.verl.entry_point:registered"),
    _verl("trainer.main_ppo", "TaskRunnerV1.init_agent_loop_manager", "db9691ea6fc9",
        "It takes the class of the agent loop's manager from the configuration."),
    _verl("utils.transferqueue_utils", "_async_meta_to_realdata", "4e3fcdf17e9a",
        "It hands the workers the fields and the extra_info of a batch."),
    _verl(_PADDING, "construct_minimal_padding_template", "8da2149e76c4",
        "A sample that pads a batch is a copy with a record."),
    _verl(_PADDING, "upsample_batch_to_divisible_size", "712c98ce70fa",
        "A sample that pads a batch has a name that says so."),
    _verl(_LOOP_TQ, "AgentLoopManagerTQ", "2c2014d24f19", "Our manager, a subclass, starts our workers."),
    _verl(_LOOP_TQ, "AgentLoopWorkerTQ", "ae2ea55ee53a",
        "It gives a sample the extra_fields of its response, which have the record."),
    _verl(f"{_LOOP}.agent_loop", "AgentLoopWorker._run_agent_loop", "8a23de688a00",
        "Our worker tells the request which trajectory it is."),
    _verl(f"{_LOOP}.agent_loop", "AgentLoopOutput.as_dict", "a83678f37801", "It hands extra_fields on."),
    _verl(f"{_LOOP}.single_turn_agent_loop", "SingleTurnAgentLoop.run", "765c85c59168",
        "It hands on the trajectory's number and extra_fields."),
    _verl("workers.rollout.llm_server", "LLMServerClient.generate", "7b2e51213e60",
        "It hands on the trajectory's number and extra_fields."),
    _verl("workers.rollout.replica", "RolloutReplicaRegistry", "25b47c8795c6",
        "Our replica is registered in the place of vLLM's."),
    _verl("workers.rollout.replica", "TokenOutput", "066146a29165", "It has extra_fields, for the record."),
    _verl(_SERVER, "vLLMHttpServer.run_server", "e2bd34e512d9", "Our server has the engine confirm its perturbation."),
    _verl(_SERVER, "vLLMHttpServer.generate", "98d1b7a3a17b", "Our server picks up the record."),
    _verl(_SERVER, "vLLMHttpServer._get_worker_extension_cls", "3d69431647e9",
        "Our extension of vLLM's worker acts at the end of a weight sync."),
    _verl(_SERVER, "vLLMReplica.__init__", "c1720aaf7610", "Our replica starts our server."),
    _verl("workers.rollout.vllm_rollout.utils", "vLLMColocateWorkerExtension", "ee243df2600d",
        "Our extension calls its methods at the end of a weight sync."),
    _verl("workers.engine.base", "EngineRegistry", "54452eee1279",
        "Our engine is registered as a vendor's, which verl prefers to the device's."),
    _verl(_FSDP, "FSDPEngineWithLMHead.prepare_model_inputs", "2652efd0aee1",
        "The replay relies on its rows, which are right-padded or packed."),
    _verl(_FSDP, "FSDPEngineWithLMHead.prepare_model_outputs", "384ab09aab7b",
        "Our engine puts densities in the place of the tokens' log-probabilities."),
    _verl(_FSDP, "FSDPEngineWithLMHead.forward_step", "d2fa75d4cdf9", "Our engine replays the rollout."),
    _verl(_FSDP, "FSDPEngine._build_fsdp_module", "980b7d8b72c1", "Our engine offloads nothing on a CPU."),
    _verl(_WORKERS, "ActorRolloutRefWorker.init_model", "61d59571adb3",
        "It makes actor and reference from the registered engines."),
    _verl(_WORKERS, "TrainingWorker.infer_batch", "24e5308887fd", "It hands all outputs of the engine on."),
    _verl("workers.utils.losses", "ppo_loss", "d7a7f4ab82c8", "It uses the log_probs of the engine's outputs."),
)
# fmt: on


def active(conditions: Iterable[str]) -> tuple[Patch, ...]:
    """Returns the rows of the conditions that hold, in the order of the table."""
    holding = frozenset(conditions)
    return tuple(row for row in (*OPENRLHF, *VLLM, *VERL) if not holding.isdisjoint(row.when.split(" or ")))


def install(conditions: Iterable[str]) -> None:
    """Applies the active rows, now for modules already imported and on import for the others."""
    place(active(conditions))


def main(argv: Sequence[str] = (), write: Callable[[str], object] = print) -> int:
    """Prints the rows of every package that is there with the states found; returns 1 if one does not match."""
    root = Path(argv[0]) if argv else None
    all_match = True
    for row in (*OPENRLHF, *VLLM, *VERL):
        if source_of(row.module.partition(".")[0], root) is None:
            continue
        state = row.state(root)
        matches = state == row.upstream
        all_match = all_match and matches
        mark = "ok " if matches else "NOT"
        write(f"{mark} [{row.when}] {row.target} -> {row.ours}: {row.why} ({row.checked}: {state})")
    return 0 if all_match else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
