"""A training step of one rank, in the order of training/trainer.py, with what lives at each moment.

Operators of embedding, final norm and loss run in the step's own ledger; blocks come as profiles,
one for each kind; what FSDP2 does in between is in fsdp.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from drillyard.config.kernel_rules import MASTER_BYTES
from drillyard.estimation.memory.autograd import (
    CountedStorage,
    Ledger,
    MemoryKind,
    OperatorNode,
    SizedTensor,
    Tape,
    gradient_sink,
)
from drillyard.estimation.memory.block_forward import BlockInputs
from drillyard.estimation.memory.block_profile import BlockProfile, MemoryDelta, profile_block
from drillyard.estimation.memory.fsdp import REWRITTEN_IN, FsdpMemory, fsdp_unit
from drillyard.estimation.memory.loss import PendingBackward, loss
from drillyard.estimation.memory.operators import norm, scaled
from drillyard.estimation.setup import COMPUTE_BYTES, Setup

STEP_COUNT_BYTES: Final = 4
INT64_BYTES: Final = 8
FP32_BYTES: Final = 4

SCALES_EMBEDDINGS: Final = frozenset({"gemma", "gemma2", "gemma3_text", "granite"})
LOGITS_STEPS: Final = {"gemma2": "sts", "cohere": "s", "cohere2": "s", "granite": "s"}
"""Operations of a model's head on logits after its product, a letter each: `s` a scale, `t` a tanh,
which is kept."""
TABLES_IN_FP32: Final = frozenset({"olmo2", "olmo3"})


class StepMemory:
    """One step of `setup`, run when it is made: `ledger` then holds its peak, `moment` where it
    was."""

    def __init__(
        self, setup: Setup, *, fuses: bool = False, skips_first_product: bool = False
    ) -> None:
        self.setup = setup
        self.spec = setup.spec
        self.keeps_gradients_whole = setup.keeps_unsharded and setup.gradient_accumulation > 1
        self.compute = COMPUTE_BYTES[setup.precision]
        self.master = MASTER_BYTES[setup.precision]
        is_older = setup.torch_release < REWRITTEN_IN and not setup.holds_whole
        widens = setup.holds_whole and not setup.keeps_gradients_narrow
        self.gradient_itemsize = self.master if widens else None
        self.head_gradient = self.compute if is_older else self.master
        self.adds_at_once = not is_older or self.compute == self.master
        self.ledger = Ledger()
        self.moment = "start"
        self.moments: dict[str, int] = {}
        """The most bytes alive in each phase of the step."""
        # Equal blocks are one object, so each kind is looked at once.
        kinds = {id(block): block for block in self.spec.blocks}
        units = {number: fsdp_unit(block.tensors, setup) for number, block in kinds.items()}
        self.units = [units[id(block)] for block in self.spec.blocks]
        self.units.append(fsdp_unit(self.spec.root, setup))
        self.root = len(self.units) - 1
        self.sharding = FsdpMemory(self.ledger, self.units, setup)
        self.block_run = BlockInputs(
            model_type=self.spec.model_type,
            hidden_size=self.spec.hidden_size,
            sequences=setup.micro_batch_size,
            length=setup.sequence_length,
            itemsize=self.compute,
            kernel=setup.kernel,
            mode=setup.activation_checkpointing,
            positions=self.spec.positions,
            adapters=setup.adapters,
            quantized=setup.quantized,
            fuses=fuses,
            skips_first_product=skips_first_product,
            gradient_itemsize=self.gradient_itemsize,
        )
        self._profiles: dict[tuple[int, bool, bool], BlockProfile] = {}
        self._run()

    @property
    def rows(self) -> int:
        return self.setup.tokens_per_micro_batch

    @property
    def loss_rows(self) -> int:
        """Rows that carry loss, at most all of them, padded to an eighth of a chunk
        (models/loss.py, loss_inputs)."""
        granule = max(1, self.setup.loss_chunk_tokens // 8)
        return -(-self.rows // granule) * granule

    @property
    def optimizer_bytes(self) -> int:
        """Two moments of each trained shard, and a step count in fp32 for each of its tensors."""
        return sum(
            int(2 * u.trained_shard * self.setup.moment_bytes) + u.num_trained * STEP_COUNT_BYTES
            for u in self.units
        )

    @property
    def gradient_bytes(self) -> int:
        """Gradients of this rank's shards when the optimizer begins."""
        trained = sum(unit.trained_shard for unit in self.units)
        if not self.setup.keeps_gradients_narrow:
            return trained * self.master
        summed = self.setup.summed_parameters
        return summed * self.master + (trained - summed) * self.compute

    @contextmanager
    def during(self, moment: str) -> Iterator[None]:
        """A phase of the step: its peak goes to `moments`, and is the step's where it is the
        highest so far."""
        ledger = self.ledger
        before = ledger.peak, ledger.at_peak
        ledger.reset_peak()
        yield
        self.moments[moment] = max(self.moments.get(moment, 0), ledger.peak)
        if ledger.peak > before[0]:
            self.moment = moment
        else:
            ledger.peak, ledger.at_peak = before

    def _run(self) -> None:
        setup = self.setup
        with self.during("start"):
            self._take_state()
            batches = CountedStorage(
                self.ledger, setup.gradient_accumulation * self._batch_bytes, MemoryKind.INPUTS
            )
        # From the second micro-batch on all are alike, as there are gradients already; with
        # replicas from the third, as the second's are held for them.
        count = min(2 if setup.replicate == 1 else 3, setup.gradient_accumulation)
        for number in range(count):
            self._micro_batch(first=number == 0, last=number == count - 1)
        with self.during("optimizer step"):
            # The norm of each gradient, and all of them in one tensor.
            norms = 2 * sum(u.num_trained for u in self.units) * self.master
            CountedStorage(self.ledger, norms, MemoryKind.TEMPORARIES)
        if self._widens_at_update:
            with self.during("update of the largest weight"):
                CountedStorage(
                    self.ledger, self._largest_narrow * self.master, MemoryKind.TEMPORARIES
                )
        del batches

    @property
    def _widens_at_update(self) -> bool:
        """Whether torch's AdamW updates, which needs each narrow gradient in master precision."""
        takes_narrow = self.setup.updates_in_one_pass or self.setup.packed_moments
        narrow = self.setup.keeps_gradients_narrow and self.compute != self.master
        return narrow and not takes_narrow

    @property
    def _largest_narrow(self) -> int:
        """Elements of the largest tensor whose gradient is in compute precision."""
        if self.setup.adapters is not None:
            return max(unit.largest_trained for unit in self.units)
        summed = {"head", "embedding"} if self.spec.tied else {"head"}
        of_root = (t.parameters for t in self.spec.root if t.role not in summed)
        return max((*of_root, *(unit.largest_trained for unit in self.units[: self.root])))

    def _take_state(self) -> None:
        """Weights and moments of this rank's shards; they are there all the time."""
        ledger, units = self.ledger, self.units
        ledger.take(sum(self.sharding.resting_bytes(unit) for unit in units), MemoryKind.PARAMETERS)
        ledger.take(self.optimizer_bytes, MemoryKind.OPTIMIZER)
        if self.setup.holds_whole and self.compute != self.master:
            ledger.take(
                sum(unit.trained_shard for unit in units) * self.compute, MemoryKind.GATHERED
            )
        if self.spec.positions is None:
            # Two copies of the rotary frequencies, one per pair of dimensions (transformers,
            # *RotaryEmbedding).
            ledger.take(2 * (self.spec.head_dim // 2) * FP32_BYTES, MemoryKind.BUFFERS)

    @property
    def _batch_bytes(self) -> int:
        """A micro-batch on the device: tokens, positions, rows and targets of the loss as int64,
        and the masks."""
        per_score = {"sdpa": 1, "eager": FP32_BYTES}.get(self.setup.kernel, 0)
        masks = len(set(self.spec.windows)) * self.rows * self.setup.sequence_length * per_score
        return 2 * (self.rows + self.loss_rows) * INT64_BYTES + masks

    def _micro_batch(self, *, first: bool, last: bool) -> None:
        adds = self.keeps_gradients_whole and not first and self.adds_at_once
        e = Tape(
            self.ledger,
            self.compute,
            accumulates=adds,
            gradient_itemsize=self.gradient_itemsize,
        )
        tables = CountedStorage(self.ledger, self._rotary_bytes, MemoryKind.INPUTS)
        waiting, source = self._forward(e, adds=adds)
        self._backward(
            e, waiting, source, adds=adds, reduces=last or not self.keeps_gradients_whole
        )
        if last:
            self.sharding.finish()
        del tables

    # Forward

    def _forward(self, e: Tape, *, adds: bool) -> tuple[PendingBackward, OperatorNode]:
        """Everything up to the loss; returns what waits for backward, and where the last block's
        gradient arrives."""
        spec, sharding, ledger = self.spec, self.sharding, self.ledger
        with self.during("embedding"):
            sharding.gather(self.root, forward=True)
            self._embed(e)
        embeddings_held = 0
        for number in range(self.root):
            with self.during("forward of a layer"):
                sharding.gather(number, forward=True)
                found = self._profile(number, adds=adds)
                self._excursion(found.forward_peak)
                self._apply(found.kept)
                if not self.setup.keeps_unsharded:
                    sharding.reshard(number)
            if number == 0 and not found.keeps_input:
                # The base model's forward holds the embedded tokens in a variable until it ends.
                embeddings_held = self._hidden_bytes
                ledger.take(embeddings_held, MemoryKind.ACTIVATIONS)
        with self.during("loss"):
            normed, source = self._final_norm(e)
            ledger.give(embeddings_held, MemoryKind.ACTIVATIONS)
            rows = e.empty(self.loss_rows * spec.hidden_size)
            waiting = loss(
                e,
                rows=self.loss_rows,
                chunk=self.setup.loss_chunk_tokens,
                hidden_size=spec.hidden_size,
                vocab_size=spec.head_matrix_parameters // spec.hidden_size,
                trains_head=self.setup.adapters is None,
                head_gradient_itemsize=self.head_gradient,
                steps=LOGITS_STEPS.get(spec.model_type, ""),
                in_place=self.setup.device_type == "cuda" and self.setup.precision != "fp64",
            )
            waiting.hidden = normed.node
            del normed, rows
            sharding.release_all_gather()
        return waiting, source

    @property
    def _rotary_bytes(self) -> int:
        """Cosines and sines [B, T, D] that all layers share."""
        if self.spec.positions is not None:
            return 0
        itemsize = (
            max(self.compute, FP32_BYTES)
            if self.spec.model_type in TABLES_IN_FP32
            else self.compute
        )
        return 2 * self.rows * self.spec.head_dim * itemsize

    @property
    def _hidden_bytes(self) -> int:
        return self.rows * self.spec.hidden_size * self.compute

    def _embed(self, e: Tape) -> None:
        """Embedded tokens; they stay in the ledger as the first block's input."""
        hidden = e.empty(self.rows * self.spec.hidden_size)
        if self.spec.positions is not None:
            positions = e.empty(hidden.elements)
            total = e.empty(hidden.elements)
            del positions
            hidden = total
            del total
        if self.spec.model_type in SCALES_EMBEDDINGS:
            hidden = scaled(e, hidden)
        del hidden
        self.ledger.take(self._hidden_bytes, MemoryKind.ACTIVATIONS)

    def _final_norm(self, e: Tape) -> tuple[SizedTensor, OperatorNode]:
        """The final norm of the last block's result, whose bytes in the ledger become a tensor
        here."""
        self.ledger.give(self._hidden_bytes, MemoryKind.ACTIVATIONS)
        source = gradient_sink()
        hidden = e.empty(self.rows * self.spec.hidden_size)
        hidden.node = source
        trained = self.setup.adapters is None
        weight = e.weight(self.spec.hidden_size, trained=trained)
        has_bias = any(t.role == "norm" and t.name.endswith("bias") for t in self.spec.root)
        bias = e.weight(self.spec.hidden_size, trained=trained) if has_bias else None
        return norm(
            e, self.spec.model_type, self.spec.blocks[0].norm, hidden, self.rows, weight, bias
        ), source

    # Backward

    def _backward(
        self, e: Tape, waiting: PendingBackward, source: OperatorNode, *, adds: bool, reduces: bool
    ) -> None:
        sharding = self.sharding
        last = self.root - 1
        with self.during("backward of the final norm"):
            if self.units[self.root].gathered_shard:
                sharding.prefetch(last)
            self._back_to_hidden(e, waiting, source, adds=adds)
        layer = (
            "backward of a layer"
            if self.setup.activation_checkpointing == "none"
            else "backward of a recomputed layer"
        )
        for number in range(last, -1, -1):
            with self.during(layer):
                sharding.gather(number, forward=False)
                if number > 0:
                    sharding.prefetch(number - 1)
                found = self._profile(number, adds=adds)
                if found.recompute_peak is not None:
                    self._excursion(found.recompute_peak)
                self._excursion(found.backward_peak)
                self._apply(found.released)
                sharding.whole_gradients[number] += found.released.of(MemoryKind.WHOLE_GRADIENTS)
            if number > 0 or self.setup.adapters is None:
                with self.during("reduction of a layer's gradients"):
                    self._after_backward(number, reduces=reduces)
        with self.during("backward of the embedding"):
            if self.setup.adapters is None:
                self._back_to_embedding(adds=adds)
        with self.during("last reduction, before the optimizer step"):
            self._after_backward(self.root, reduces=reduces)
            if self.setup.adapters is not None:
                # Its input carries no gradient, so it is left to the end of backward.
                self._after_backward(0, reduces=reduces)

    def _back_to_hidden(
        self, e: Tape, waiting: PendingBackward, source: OperatorNode, *, adds: bool
    ) -> None:
        """From the rows' gradient through the choice of rows and the final norm to the last block's
        result."""
        if waiting.head is not None:
            # A tied one waits for the embedding's part, and their sum is added.
            self._keep_gradient(waiting.head, adds=adds, waits=self.spec.tied)
            waiting.head = None
        e.kind = MemoryKind.TEMPORARIES
        zeros = e.empty(self.rows * self.spec.hidden_size)
        gradient: SizedTensor | None = e.empty(zeros.elements)
        del zeros
        waiting.rows = None
        assert isinstance(waiting.hidden, OperatorNode)
        waiting.hidden.gradient, gradient = gradient, None
        waiting.hidden = None
        e.backward()
        e.kind = MemoryKind.ACTIVATIONS
        for weight in e.weights:
            if weight.gradient is not None:
                gradient, weight.gradient = weight.gradient, None
                self._keep_gradient(gradient, adds=adds)
                del gradient
        assert source.gradient is not None
        # From here on its bytes are the ledger's, as the blocks' profiles count them.
        source.gradient = None
        self.ledger.take(self._hidden_bytes, MemoryKind.TEMPORARIES)

    def _keep_gradient(self, gradient: SizedTensor, *, adds: bool, waits: bool = False) -> None:
        """A gradient of one of the root's weights stays, or is added to that of earlier
        micro-batches: at once, or at the end of backward if it `waits`."""
        nbytes = gradient.elements * gradient.itemsize
        if not adds:
            self.sharding.whole_gradients[self.root] += nbytes
        if not adds or waits:
            self.ledger.live[MemoryKind.WHOLE_GRADIENTS] += nbytes
            self.ledger.total += nbytes

    def _back_to_embedding(self, *, adds: bool) -> None:
        ledger, spec = self.ledger, self.spec
        if spec.model_type in SCALES_EMBEDDINGS:
            ledger.take(self._hidden_bytes, MemoryKind.TEMPORARIES)
            ledger.give(self._hidden_bytes, MemoryKind.TEMPORARIES)
        table, positions = (
            sum(t.parameters for t in spec.root if t.role == role) * self.compute
            for role in ("embedding", "positions")
        )
        ledger.take(table + positions, MemoryKind.WHOLE_GRADIENTS)
        ledger.give(self._hidden_bytes, MemoryKind.TEMPORARIES)
        narrow = table + positions
        if self.gradient_itemsize is not None:
            positions = positions // self.compute * self.master
        if self.gradient_itemsize is not None or (self.setup.holds_whole and spec.tied):
            table = table // self.compute * self.master
        if table + positions != narrow:
            ledger.take(table + positions, MemoryKind.WHOLE_GRADIENTS)
            ledger.give(narrow, MemoryKind.WHOLE_GRADIENTS)
        if spec.tied:
            # The head's gradient of the same weights waits here: their sum is a new tensor, and
            # both go.
            summed = spec.head_matrix_parameters * self.head_gradient
            ledger.take(summed, MemoryKind.WHOLE_GRADIENTS)
            ledger.give(summed + table, MemoryKind.WHOLE_GRADIENTS)
            table = summed if adds else 0
        if adds:
            ledger.give(table + positions, MemoryKind.WHOLE_GRADIENTS)
        else:
            self.sharding.whole_gradients[self.root] += table + positions

    def _after_backward(self, number: int, *, reduces: bool) -> None:
        if reduces:
            self.sharding.reduce(number)
        else:
            self.sharding.keep_whole(number)

    # Blocks

    def _profile(self, number: int, *, adds: bool) -> BlockProfile:
        block = self.spec.blocks[number]
        carries = number > 0 or self.setup.adapters is None
        key = (id(block), carries, adds)
        if key not in self._profiles:
            self._profiles[key] = profile_block(
                block, replace(self.block_run, from_weights=carries, accumulates=adds)
            )
        return self._profiles[key]

    def _excursion(self, difference: MemoryDelta) -> None:
        ledger = self.ledger
        if ledger.total + difference.total > ledger.peak:
            ledger.peak = ledger.total + difference.total
            at_peak = list(ledger.live)
            for kind, nbytes in difference.by_kind:
                at_peak[kind] += nbytes
            ledger.at_peak = tuple(at_peak)

    def _apply(self, difference: MemoryDelta) -> None:
        ledger = self.ledger
        for kind, nbytes in difference.by_kind:
            ledger.live[kind] += nbytes
        ledger.total += difference.total
