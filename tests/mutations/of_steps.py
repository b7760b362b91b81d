# SPDX-License-Identifier: Apache-2.0
"""A rollout step as a graph, its records on their way to the host, the embedding's override, neighbor indices."""

_GRAPHS = "rollout/test_step_graphs.py::test_a_step_has_its_own_greedy_tokens_and_temperatures"
_GRAPHS += " rollout/test_step_graphs.py::test_the_tokens_of_a_step_are_out_of_reach_of_the_next_replay"
_GRAPHS += " rollout/test_step_graphs.py::test_a_buffer_of_another_stride_ends_the_graphs_that_read_the_old_one"
_GRAPHS += " rollout/test_step_graphs.py::test_a_graph_has_the_bits_of_its_parts"
_GRAPHS += " rollout/test_step_graphs.py::test_filtered_logits_of_a_padded_vocabulary_have_the_strides_of_the_rehearsal"
_MOVED = "rollout/test_step_graphs.py::test_a_state_that_has_moved_is_captured_anew"
_MOVED_OUTPUT = "rollout/test_step_graphs.py::test_an_output_layer_that_has_moved_is_captured_anew"
_OUTSIDE = "rollout/test_step_graphs.py::test_what_reads_logits_or_hidden_states_keeps_the_logits_outside"
_RECORDS = "rollout/test_step_records.py"
_NEIGHBORS, _HNSW = "perturbations/neighbors/test_exact.py", "perturbations/neighbors/test_hnsw.py"

MUTATIONS = {
    ("ngrpo/rollout/step_graphs.py", _MOVED): [
        (
            "if self._graphs and self._current_addresses() != self._addresses:",
            "if False:",
            "graphs: a state that has moved",
        ),
    ],
    ("ngrpo/rollout/step_graphs.py", _GRAPHS): [
        ("is not None or self._has_greedy:", "is not None:", "graphs: greedy tokens of an earlier step"),
        ("self._tokens[:batch].clone()", "self._tokens[:batch]", "graphs: tokens that the next replay overwrites"),
        (
            "if logits.temperature is not self._temperature_of",
            "if self._temperature_of is None",
            "graphs: first temperatures",
        ),
        ("        flat.copy_(values)\n", "", "graphs: the first run's columns are replayed"),
        ("drawable=scaled.clone())", "drawable=scaled)", "graphs: filtered logits with the padding of vLLM's"),
        (
            "            self.forget()  # graphs have its address",
            "            pass  # graphs have its address",
            "graphs: a moved buffer",
        ),
        ("if size >= rows), None)", "if size > rows), None)", "graphs: a full bucket takes the next"),
    ],
    ("ngrpo/rollout/perturber.py", _MOVED_OUTPUT): [
        (
            "            tensors += self._output.tensors\n",
            "            pass\n",
            "graphs: an output layer that has moved",
        ),
    ],
    ("ngrpo/rollout/perturber.py", _OUTSIDE): [
        ("perturbation.reads_hidden or masks is not None", "masks is not None", "graphs: hidden states that are read"),
        ("masks is not None or schedule is not None\n", "schedule is not None\n", "graphs: logits that masks need"),
    ],
    ("ngrpo/rollout/output_layer.py", "rollout/test_output_layer.py"): [
        (
            "            self._left_to_graph = False\n            self._hidden = None\n",
            "            pass\n",
            "output layer: hidden states of a step that failed",
        ),
        (
            "if not runs_v2(runner) or config.parallel_config.world_size > 1 or ",
            "if not runs_v2(runner) or ",
            "output layer: several ranks",
        ),
    ],
    ("ngrpo/rollout/runners.py", "rollout/test_output_layer.py"): [
        ("if grammar_output is not None or not perturber", "if not perturber", "logits in a graph: a grammar"),
        ("reports_log_probs or states.any_greedy", "states.any_greedy", "logits in a graph: log-probabilities"),
        (
            "self.perturber is perturber and self.composition == perturber.composition",
            "self.perturber is perturber",
            "logits in a graph: another batch",
        ),
    ],
    ("ngrpo/rollout/step_records.py", _RECORDS): [
        ("(words[:, 0] & 2) > 0", "(words[:, 0] & 1) > 0", "packed records: agreed is fed"),
        (
            "words if len(rows) == len(words) else words[rows]",
            "words",
            "packed records: fields of rows without an edit",
        ),
        ("return self.gated_rows[fed], {", "return self.gated_rows, {", "separate records: rows that were not fed"),
        (
            "self._places[name] = slice(start, self.width)",
            "self._places[name] = slice(2, self.width)",
            "packed records: places",
        ),
    ],
    ("ngrpo/trainers/openrlhf/short_steps.py", "trainers/openrlhf/test_step_faults.py"): [
        ("left_out = len(items) % batch", "left_out = 0", "a short step: its rest is trained"),
        ("or whole_step % train.batch_size:", "or False:", "a short step: a rest that every step has"),
        (
            "        self.leave_out_remainder()\n        return super",
            "        return super",
            "a short step: the critic",
        ),
    ],
    ("ngrpo/trainers/openrlhf/moving_average.py", "trainers/openrlhf/test_moving_average.py"): [
        ('parameter.data.to("cpu", torch.float32)', "parameter.data.clone()", "the average: in bfloat16"),
        ("            if weight.requires_grad:\n", "            if True:\n", "the average: of frozen weights"),
    ],
    ("ngrpo/rollout/batch.py", _RECORDS): [
        ("            columns.slots.fill(scratch)\n", "", "batch: rows beyond the batch have slot 0"),
        ("            columns.first[:count] = self.first\n", "", "batch: the first positions"),
    ],
    ("ngrpo/rollout/async_scheduling.py", _RECORDS): [
        (
            "                step.buffer.give_back()\n",
            "                pass\n",
            "pending: buffers are never used again",
        ),
    ],
    ("ngrpo/rollout/async_scheduling.py", "rollout/test_async_scheduling.py"): [
        (
            "if consecutive and not self._continues(step):",
            "if False:",
            "pending: positions that do not follow are written at once",
        ),
        (
            "        self._newest_step[step.slots] = self.added\n",
            "",
            "pending: those of a slot are not waited for",
        ),
        (
            "else log_probs[self.kept_rows]",
            "else log_probs[: len(slots)]",
            "pending: log-probabilities of other rows",
        ),
        (
            "edited_slots=self.slots[edited_rows]",
            "edited_slots=slots[: len(edited_rows)]",
            "pending: edits of other slots",
        ),
        ("wait=self._stored + len(arrived) < until", "wait=False", "pending: nothing is waited for"),
        ("if event is not None and not event.query():", "if False:", "uploads: a buffer in use"),
    ],
    ("ngrpo/rollout/input_override.py", "rollout/test_input_override.py"): [
        (
            "        self.clear_drawn()\n        self.drawn_fed",
            "        self.drawn_fed",
            "override: edits of an earlier step",
        ),
        ("        if self._laid_out > rows:\n", "        if False:\n", "override: sources of a longer forward stay"),
        ("self._laid_out = rows if replaces else 0", "self._laid_out = 0", "override: sources are never taken back"),
        ("index_copy_(0, rows + self.drawn_rows, vectors)", "index_copy_(0, rows, vectors)", "override: stored edits"),
        (
            "            self._module.override_sources.copy_(sources)",
            "            pass",
            "override: suspended for good",
        ),
        ("        self._module.override_sources.fill_(PLAIN)\n", "", "override: acts inside an encoder"),
    ],
    ("ngrpo/rollout/records.py", "rollout/test_records.py"): [
        ("expected is not None and fingerprint != expected", "False", "records: another perturbation on a worker"),
        (
            "truncate(trajectory.record.prompt_tokens + generated)",
            "truncate(generated)",
            "records: cut without the prompt",
        ),
        (
            "[request_id] if isinstance(request_id, str)",
            "list(request_id) if isinstance(request_id, str)",
            "records: a name",
        ),
        (
            "if is_internal or name in external_ids:",
            "if True:",
            "records: finished",
        ),
    ],
    ("perturbations/neighbors/exact.py", _NEIGHBORS): [
        ("_ROUNDING_L1 = 2.0**-10", "_ROUNDING_L1 = 0.0", "exact: l1 products are taken for exact"),
        ("_ROUNDING = 2.0**-7", "_ROUNDING = 0.0", "exact: products are taken for exact"),
        ("values[:, norm_b == 0.0] = -1.0", "values[:, norm_b == 0.0] = 0.0", "exact: a zero vector is orthogonal"),
        ("(norm_b > 0.0), 2.0, _ROUNDING)", "(norm_b > 0.0), _ROUNDING, _ROUNDING)", "exact: a tiny row's underflow"),
        ("_ROUNDING * norm_b.square()", "_ROUNDING", "exact: slack of l2"),
        (
            "torch.where(norms > 0.0, cosine",
            "torch.where(norms >= 0.0, cosine",
            "exact: cosine of zero is 0",
        ),
    ],
    ("perturbations/neighbors/exact.py", "perturbations/neighbors/test_ranks.py"): [
        ("neighbors += self._shard.first", "neighbors += 0", "exact: ids of a rank's own rows"),
        (
            "is_local = (own_columns >= 0) &",
            "is_local = (own_columns < len(self.norms)) &",
            "exact: another rank's token is out",
        ),
    ],
    ("perturbations/neighbors/base.py", _NEIGHBORS): [
        ("self._excluded.sum()) - 1, 0)", "self._excluded.sum()), 0)", "neighbors: a token may be its own"),
        ("(token_ids < 0) | (token_ids >= self._size)", "(token_ids >= self._size)", "neighbors: a negative id"),
        (
            "ids_by_id, by_id = ids.sort(dim=-1)",
            "ids_by_id, by_id = ids.sort(dim=-1, descending=True)",
            "neighbors: ties by the higher id",
        ),
    ],
    ("perturbations/neighbors/hnsw.py", _HNSW): [
        ("scores[:, 1:].masked_fill_(is_repeated, -torch.inf)", "pass", "hnsw: a candidate twice"),
        (
            "-self._exact.norms.float() if self",
            "self._exact.norms.float() if self",
            "hnsw: the shortest are hubs of dot",
        ),
        ("products.mul_(2.0).sub_(norms.square())", "products.mul_(1.0).sub_(norms.square())", "hnsw: hubs by l2"),
        (
            "            products.div_(norms.clamp_min(torch",
            "            (norms.clamp_min(torch",
            "hnsw: hubs by cosine",
        ),
    ],
    ("perturbations/neighbors/words.py", "perturbations/neighbors/test_words.py"): [
        ("        if len(short_rows):\n", "        if False:\n", "words: too few others among the nearest"),
        ("if _REPLACEMENT not in text:", "if True:", "words: parts of characters are one word"),
        (
            "numbers = list(range(size))",
            "numbers = [0] * size",
            "words: padding is a word",
        ),
    ],
    ("perturbations/neighbors/refresh.py", "perturbations/neighbors/test_refresh.py"): [
        (
            "                changed = changed[:followed_before]",
            "                pass",
            "drift: sets of older weights are the last ones",
        ),
        ("if self._on_demand and self._every != 1:", "if False:", "refresh: rows of later weights"),
        (
            "self._is_of_older_weights = not is_due and not self._on_demand",
            "self._is_of_older_weights = False",
            "refresh: a larger k of new weights",
        ),
        ("        self._k = 0\n        if not k", "        if not k", "drift: counted without a query"),
    ],
}
