# SPDX-License-Identifier: Apache-2.0
"""Settings of a run, what they need of a machine, result folders, and an evaluation."""

_HOST = "machine/hardware/test_host_plan.py"
_POSITIONS = "machine/models/test_positions.py"
_MEMORY = "commands/test_dry_run.py::test_memory_of_a_trained_model_by_hand"
_MEMORY += " commands/test_dry_run.py::test_memory_of_reference_logits_and_engine_by_hand"
_MEMORY += " commands/test_dry_run.py::test_ray_needs_a_cpu_for_each_gpu_and_for_openrlhfs_own_processes"
_LIMITS = "config/test_run.py::test_a_step_of_an_engine_has_room_for_a_token_of_each_response"
_GROUPS = "commands/test_dry_run.py::test_the_ranks_of_a_ring_have_the_same_responses"
_GROUPS += " commands/test_dry_run.py::test_placement_is_that_of_openrlhfs_own_program"
_PLANS = "machine/upstream/test_placement.py::test_plans_that_cannot_work"
_PLANS += " machine/upstream/test_placement.py::test_engines_of_their_own_leave_room_for_a_context"
_PLANS += " machine/upstream/test_placement.py::test_a_colocated_script_is_told_the_flags_with_which_it_fits"
_FOLDER = "workbench/evaluate/test_evaluation.py"
_SAMPLES = "workbench/evaluate/test_sample_comparison.py"
_POLICY = "workbench/evaluate/test_engine.py"

MUTATIONS = {
    ("ngrpo/config/parse.py", "commands/test_train.py"): [
        (
            '            booleans.pop(f"--{key}", None)  # of an earlier file\n',
            "",
            "files: a boolean that a later one replaced",
        ),
        (
            "options -= SETTINGS.keys() | ALIASES.keys()",
            "options -= SETTINGS.keys()",
            "files: another perturbation, reproducible",
        ),
        ("            replaced |= set(names)\n", "            pass\n", "files: the model twice"),
    ],
    ("ngrpo/config/parse.py", _LIMITS): [
        ("if responses > tokens:", "if responses >= tokens:", "limits: as many tokens as responses"),
    ],
    ("ngrpo/config/arms.py", "config/test_arms.py"): [
        (
            'key=lambda option: option.count("."))',
            'key=lambda option: -option.count("."))',
            "arms: a gate's option before the gate",
        ),
        ("if option in arm.options or not", "if not", "arms: a sweep over an arm's own value"),
        (
            'lowest is None or lowest != entry.metadata.get("high")',
            "True",
            "arms: an option that allows one value is swept",
        ),
        (
            "(other.spec, _read_numbers(other.training)) == (spec, flags)",
            "other.spec == spec",
            "arms: others by a flag are the same",
        ),
    ],
    ("ngrpo/config/stretches.py", "config/test_stretches.py"): [
        ('if stretch["first_step"] <= step]', 'if stretch["first_step"] < step]', "stretches: one of a single step"),
        ("not (name in before and name in after)", "False", "stretches: the content of another file is a change"),
        ('"first_step": step + 1, "settings"', '"first_step": step, "settings"', "stretches: a step early"),
        (
            'return str(path.resolve()) if path.exists() else value or "none"',
            'return value or "none"',
            "stretches: a folder by two names",
        ),
    ],
    ("ngrpo/config/verl_lines.py", "config/test_verl_lines.py"): [
        ("max(batch // responses_per_prompt, 1)", "max(batch, 1)", "verl: responses for prompts"),
        (
            "    if flags.has(_KL_LOSS):\n",
            "    if not flags.has(_KL_LOSS):\n",
            "verl: KL in the reward for the loss",
        ),
        ('if name == "name" or defaults.get(name) != value}', "if True}", "verl: options at their defaults"),
    ],
    ("ngrpo/config/batch_checks.py", "machine/upstream/test_placement.py::TestRows"): [
        (
            "return min(limit, sum(min(limit, count) for count in counts))",
            "return sum(min(limit, count) for count in counts)",
            "rows: of several files beyond the limit",
        ),
        ("if responses * passes >= batch:", "if responses >= batch:", "rows: episodes are not counted"),
        ("(rows - left_out) * responses_per_prompt", "rows * responses_per_prompt", "rows: those left out count"),
        ("if rows is None or rows >= prompts:", "if rows is None or rows > prompts:", "rows: as many as a step takes"),
    ],
    ("ngrpo/machine/hardware/gpu_plan.py", _MEMORY): [
        ("states = 12 * split", "states = 8 * split", "memory: no master copy"),
        (
            "if stage < 3 and _accumulates(args):",
            "if _accumulates(args):",
            "memory: ZeRO-3 keeps sums",
        ),
        (
            'max(size.kv_heads // args["vllm.tensor_parallel_size"], 1)',
            "size.kv_heads",
            "memory: KV heads are on all ranks",
        ),
        ("return size.layers * 2 * heads", "return size.layers * heads", "memory: keys without values"),
        ("cpus = needed + (3 if", "cpus = needed + (1 if", "CPUs of asynchronous rollouts"),
        ('// args["ds.ring_attn_size"]', "", "memory: a ring's ranks have whole samples"),
        ("(share * gpu, _ASLEEP, _ASLEEP, _ASLEEP)", "(share * gpu,) * 4", "memory: an engine that sleeps keeps all"),
    ],
    ("ngrpo/machine/hardware/gpu_plan.py", _PLANS): [
        ("and share > _MOST_AWAKE:", "and share >= 1.0:", "an engine that does not sleep takes all"),
    ],
    ("ngrpo/machine/hardware/gpu_notes.py", _PLANS): [
        (
            "range(ceil(100 * args[name]) - 1, _LEAST_HUNDREDTHS - 1, -1)",
            "range(_LEAST_HUNDREDTHS, ceil(100 * args[name]))",
            "memory: the smallest share that fits",
        ),
        ("savings.insert(0, _TURNS)", "pass", "memory: sleep is not offered with another saving"),
        ("if fits({**args, **_TURNS.args}, gpu):", "if False:", "memory: a smaller engine is offered before sleep"),
        ("        args |= saving.args", "        args = saving.args", "memory: one saving of several is looked at"),
    ],
    ("ngrpo/machine/hardware/host_plan.py", _HOST): [
        ("return min(limits)", "return max(limits)", "host: a cgroup's limit"),
        ("for folder in (own, *own.parents):", "for folder in (own,):", "host: the limit of an outer cgroup"),
        ("if needed > free + kept_bytes:", "if needed > free:", "host: checkpoints that will be replaced"),
        ('needed = size * args["ckpt.max_num"]', "needed = size", "host: one checkpoint of several"),
        ("weights *= 2", "weights *= 1", "host: float32 weights of a checkpoint"),
    ],
    ("ngrpo/machine/models/positions.py", _POSITIONS): [
        ("0.1 * mscale * math.log(factor) + 1.0", "0.1 * math.log(factor) + 1.0", "yarn: mscale"),
        ('rope.get("factor") or stretched, original)', "stretched, original)", "longrope: its factor"),
        ('not is_listed or "sliding_attention" in layers', "True", "window: no layer has it"),
        ('set(layers) == {"sliding_attention"}', '"sliding_attention" in layers', "window: some layers for all"),
        ("scale not in (None, 1.0) and", "scale is not None and", "logit_scale of 1"),
    ],
    ("ngrpo/machine/storage/datafiles.py", "machine/storage/test_datafiles.py"): [
        ('encoding="utf-8-sig"', 'encoding="utf-8"', "rows: Excel's byte order mark"),
        ('text = text.rstrip("0").rstrip(".")', "pass", "labels: 7.0 is no 7"),
        ("is_in_range and len(", "len(", "rows: 1e400 is infinite"),
        ("float(str(width(value)))", "value", "rows: 0.1 of a float32 has further digits"),
        ("    if len(row) < len(pairs):\n", "    if False:\n", "rows: a key twice"),
        ("return value is None or value != value", "return value is None", "rows: pandas' NaN is a label"),
    ],
    ("ngrpo/machine/storage/result_folder.py", "machine/storage/test_result_folder.py"): [
        ("value.pop(_CHECKSUM) == _checksum(value)", "value.pop(_CHECKSUM)", "results: any checksum"),
        ("os.truncate(path, len(data) - len(tail))", "pass", "results: a cut line stays"),
        ("row.keys() >= set(keys)", "True", "results: lines without their keys"),
        ("if new and [entry.name", "if [entry.name", "results: a user's empty folder is removed"),
    ],
    ("ngrpo/machine/models/packaged.py", "machine/models/test_packaged.py"): [
        (
            "        if not folder.is_dir():  # else another process",
            "        if True:  # else another process",
            "models: another process was faster",
        ),
        (
            "    shutil.rmtree(draft, ignore_errors=True)  # of a killed process\n",
            "",
            "models: a draft of a killed process is used",
        ),
    ],
    ("ngrpo/machine/upstream/placement.py", _GROUPS): [
        ("pair = has_critic and args", "pair = args", "placement: a pair without a critic"),
        (
            'args["train.colocate_all"] and not args["train.async_enable"]',
            'args["train.colocate_all"]',
            "placement: asynchronous engines share",
        ),
        ('split = args["ds.ring_attn_size"] * args', "split = args", "placement: ranks of a ring train apart"),
    ],
    ("ngrpo/machine/hardware/surroundings.py", "machine/hardware/test_surroundings.py"): [
        ('used = len(folder.rstrip("/").encode())', 'used = len(folder.rstrip("/"))', "sockets: characters for bytes"),
        ('room = _SOCKET_BYTES - len(f"/{name}")', "room = _SOCKET_BYTES", "sockets: the name itself"),
        ("in (path, *path.absolute().parents)", "in path.absolute().parents", "caches: the folder itself is not tried"),
    ],
    ("ngrpo/workbench/evaluate/sample_comparison.py", _SAMPLES): [
        ("common = [min(n for", "common = [max(n for", "cover: responses that not all files have"),
        (
            "[k for k in DEFAULT_KS if 1 < k <= fewest]",
            "[k for k in DEFAULT_KS if 1 < k < fewest]",
            "comparison: no Pass@n",
        ),
        ("        count_before[text] += 1\n", "", "comparison: equal problems are one"),
        ('if row["correct"] not in (0, 1):', "if False:", "comparison: half right"),
        (
            "if not 0.0 < fraction <= 1.0:",
            "if not 0.0 <= fraction <= 1.0:",
            "comparison: cover of 0",
        ),
    ],
    ("ngrpo/workbench/evaluate/missing_samples.py", _FOLDER): [
        (
            "        count_before[prompt] += 1\n",
            "        count_before[prompt] += name in incomplete\n",
            "evaluation: resumed repeats have other seeds",
        ),
        (
            "limit is not None and length > limit",
            "limit is not None and length >= limit",
            "evaluation: exactly the context",
        ),
    ],
    ("ngrpo/workbench/evaluate/evaluation.py", _FOLDER): [
        ("1.0 - parsed - (timed_out or 0.0)", "1.0 - parsed", "evaluation: timed out is unreadable"),
        ("round(share or 0.0, 9) > 0.1", "(share or 0.0) > 0.1", "evaluation: a tenth is above a tenth"),
        ('settings["digest"] = digest(problems)', "pass", "rescored: the digest of the old scorer"),
    ],
    ("ngrpo/workbench/evaluate/engine.py", _POLICY): [
        ("if not 0 <= step < (", "if not 0 <= step <= (", "policy: a step after the last"),
        ("(step + 1, 10 * (step + 1), 1000 * (step + 1))", "(step + 1,)", "policy: σ of an unknown length"),
        ("if schedule is not None and temperature == 0.0:", "if False:", "policy: greedy with a schedule"),
        ("not file.name.endswith(_WEIGHTS) and not (", "not (", "policy: clean weights beside the noisy ones"),
        ('"enabled": perturbed,', '"enabled": True,', "evaluation: unperturbed requests are perturbed"),
        (
            "            engine.abort_request(list(live))",
            "            pass",
            "evaluation: a stopped one's requests go on",
        ),
    ],
    ("ngrpo/workbench/evaluate/engine.py", _FOLDER): [
        (
            'if self.finish != "stop" or not self.tokens:',
            "if not self.tokens:",
            "evaluation: a cut response has an end",
        ),
    ],
}
