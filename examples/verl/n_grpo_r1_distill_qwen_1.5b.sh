#!/usr/bin/env bash
# N-GRPO (arXiv 2606.10768) on DeepSeek-R1-Distill-Qwen-1.5B with verl 0.9.1, on 8 GPUs. Not yet run on a GPU.
# The numbers of examples/recipes/n_grpo_r1_distill_qwen_1.5b.yaml, which comments on the paper's values.
# Before: ngrpo data deepscaler && ngrpo data aime2024, and for both
#   python examples/verl/to_parquet.py data/deepscaler.jsonl data/deepscaler.parquet
set -euo pipefail
cd "$(dirname "$0")/../.."

python -m verl.trainer.main_ppo \
    trainer.v1.trainer_mode=perturbed \
    +perturbation.name=neighbor \
    +perturbation.rate=0.1 \
    +perturbation.k=3 \
    +perturbation.metric=cosine \
    "+perturbation.until='</think>'" \
    algorithm.adv_estimator=grpo \
    data.train_files=data/deepscaler.parquet \
    data.val_files=data/aime2024.parquet \
    data.max_prompt_length=4096 \
    data.max_response_length=8192 \
    data.train_batch_size=64 \
    reward.custom_reward_function.path=examples/verl/math_score.py \
    "+reward.custom_reward_function.reward_kwargs.opening='<think>'" \
    actor_rollout_ref.model.path=deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.temperature=0.7 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.03 \
    actor_rollout_ref.actor.optim.min_lr_ratio=0.1 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.total_epochs=1 \
    trainer.test_freq=25 \
    trainer.save_freq=25 \
    "$@"
