"""Fields that decide nothing: why they need no key, or the only value that has a counterpart."""

from __future__ import annotations

from typing import Any

from .keys import CHECKPOINTING, ZERO

_BUFFERS = "a buffer is a unit of the model"
_ALWAYS = "always"
_BUDGET = "zero.gather_budget bounds what is gathered and prefetched"
_DISK = "state on disk is memory-mapped; the system reads ahead and writes behind"
_METRICS = "metrics.jsonl has it for every step"
_SAVES = "a checkpoint loads under every layout"

NEEDS_NONE: dict[str, str] = {
    "wall_clock_breakdown": f"{_METRICS}, and trace.json every log.trace steps",
    "memory_breakdown": _METRICS,
    "dump_state": "the run's config.yaml has it",
    "prescale_gradients": "sums are divided once, by the number of items, after the reduction",
    "gradient_predivide_factor": "sums are divided once, after the reduction",
    "dataloader_drop_last": "every batch is whole",
    "disable_allgather": "the collective follows from what is sent",
    "zero_allow_untested_optimizer": "the optimizer is tried on cut parameters at the start",
    "zero_force_ds_cpu_optimizer": "the optimizer is the one named, wherever its state is",
    "checkpoint.tag_validation": "the ranks agree on a checkpoint's name",
    "checkpoint.load_universal": _SAVES,
    "checkpoint.parallel_write.pipeline_stage": "every rank writes its share",
    "comms_logger.*": "metrics.jsonl has bytes_pp, bytes_dp and bytes_tp of every step",
    "flops_profiler.*": "metrics.jsonl has mfu; pipeline.partition=flops tells it by stage",
    "tensorboard.*": f"{_METRICS}, and W&B",
    "csv_monitor.*": _METRICS,
    "comet.*": f"{_METRICS}, and W&B",
    "timers.*": _METRICS,
    "aio.*": _DISK,
    f"{ZERO}.allgather_partitions": _ALWAYS,
    f"{ZERO}.allgather_bucket_size": _BUFFERS,
    f"{ZERO}.reduce_bucket_size": _BUFFERS,
    f"{ZERO}.overlap_comm": _ALWAYS,
    f"{ZERO}.reduce_scatter": f"{_ALWAYS}: fewer bytes, the same sum",
    f"{ZERO}.contiguous_gradients": f"{_ALWAYS}: a flat buffer for each unit",
    f"{ZERO}.round_robin_gradients": "the owned shares are equal",
    f"{ZERO}.parameter_alignment": f"{_ALWAYS}, to 64 elements",
    f"{ZERO}.compute_grad_norm": _ALWAYS,
    f"{ZERO}.ignore_unused_parameters": "an unused parameter has gradient zero",
    f"{ZERO}.sub_group_size": "the update goes unit by unit",
    f"{ZERO}.elastic_checkpoint": _SAVES,
    f"{ZERO}.pipeline_loading_checkpoint": _SAVES,
    f"{ZERO}.load_from_fp32_weights": "checkpoints hold fp32",
    f"{ZERO}.enable_sanity_checks": "parameters and gradients are checked to be in place",
    f"{ZERO}.save_muon_momentum_buffer_in_memory": "offload.optimizer says where momentum is",
    f"{ZERO}.legacy_stage1": "there is one stage 1",
    f"{ZERO}.grad_hooks": "gradients are reduced where the program says",
    f"{ZERO}.log_trace_cache_warnings": "the order of uses is planned, not traced",
    f"{ZERO}.memory_efficient_linear": "units run as they are",
    f"{ZERO}.override_module_apply": "weights are drawn as they are materialised",
    f"{ZERO}.cpu_offload_use_pin_memory": "host memory is pinned where there is a GPU",
    f"{ZERO}.stage3_max_reuse_distance": "the order of uses is planned ahead",
    f"{ZERO}.stage3_prefetch_bucket_size": _BUDGET,
    f"{ZERO}.stage3_param_persistence_threshold": "small parameters come with their unit",
    f"{ZERO}.stage3_model_persistence_threshold": _BUDGET,
    f"{ZERO}.stage3_module_granularity_threshold": "units are gathered whole",
    f"{ZERO}.stage3_use_all_reduce_for_fetch_params": "units are all-gathered",
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": "Engine.state_dict_whole() gives fp32",
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": "Engine.state_dict_whole() gives fp32",
    f"{ZERO}.mics_hierarchical_params_gather": "units are gathered in the shard's group",
    **{
        f"{ZERO}.{group}.{field}": why
        for group in ("offload_optimizer", "offload_param")
        for field, why in {
            "pin_memory": "host memory is pinned where there is a GPU",
            **dict.fromkeys(("buffer_count", "buffer_size", "max_in_cpu", "fast_init"), _DISK),
            **dict.fromkeys(("pipeline", "pipeline_read", "pipeline_write"), _DISK),
        }.items()
    },
    f"{ZERO}.offload_param.nvme_path": "parameters go to the host at most",
    f"{CHECKPOINTING}.number_checkpoints": "recompute.every says it",
    f"{CHECKPOINTING}.contiguous_memory_optimization": "it changes no number",
    f"{CHECKPOINTING}.synchronize_checkpoint_boundary": "it changes no number",
    f"{CHECKPOINTING}.profile": "trace.json shows it",
    "pipeline.seed_layers": "a weight is drawn by its name and the seed",
    "pipeline.pipe_partitioned": "each tp rank sends to its own peer",
    "pipeline.grad_partitioned": "each tp rank sends to its own peer",
    "pipeline.use_reentrant": "recomputing is part of the program",
    "bf16.immediate_grad_update": "gradients are summed in fp32",
    "bf16.check_grad_overflow": "a step that is not finite is skipped",
    "optimizer.legacy_fusion": "the fused optimizer of torch is used",
}

OFF = (
    "amp autotuning compression_training curriculum_learning data_efficiency eigenvalue elasticity "
    "expert_parallel hybrid_engine nebula progressive_layer_drop quantize_training torch_autocast"
).split()
"""Sections that change the training and exist there only; accepted where `enabled` is false."""

UNBUILT = {"sparse_attention": "a model attends as its code says"}
"""Sections that change the training by being there, and why not here."""

ONLY: dict[str, tuple[Any, str]] = {
    "gradient_allreduce_op": ("mean", "the loss is a mean over items"),
    "managed_gradient_accumulation": (True, "a step is all its microbatches"),
    "sparse_gradients": (False, "gradients are dense"),
    "checkpoint.use_node_local_storage": (False, "a checkpoint is one folder"),
    "data_types.grad_accum_dtype": ("fp32", "gradients are summed in fp32"),
    "compile.deepcompile": (False, "compile=true is torch.compile"),
    "fp16.auto_cast": (False, "inputs keep their type"),
    "fp16.consecutive_hysteresis": (False, "a good step refills nothing"),
    "fp16.fp16_master_weights_and_grads": (False, "masters are fp32"),
    "bf16.bf16_master_weights_and_grads": (False, "masters are fp32"),
    f"{ZERO}.zero_hpz_partition_size": (1, "zero.shard_size keeps the shards in a node"),
    f"{ZERO}.zero_quantized_weights": (False, "what is sent has the parameters' precision"),
    f"{ZERO}.zero_quantized_nontrainable_weights": (False, "weights keep their precision"),
    f"{ZERO}.zero_quantized_gradients": (False, "zero.reduce_dtype is the nearest"),
    f"{ZERO}.offload_optimizer.ratio": (1, "all of the state is offloaded"),
}
