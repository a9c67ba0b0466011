"""Elements of gathered parameters on a rank, module by module, under DeepSpeed's ZeRO-3.

This follows `PartitionedParameterCoordinator` of deepspeed 0.19.8,
runtime/zero/partitioned_param_coordinator.py, once it has recorded the order of modules. When a module is
reached, its parameters are waited for, and the parameters that come next are gathered ahead: as many as fit
into the prefetch bucket, and into max_live together with those that are there. A bucket of several parameters
is gathered into one flat buffer. Waiting for the first of them copies all of them out of it, but the buffer
is freed only when the last of them has been waited for (`AllGatherCoalescedHandle`,
runtime/zero/partition_parameters.py). Until then these parameters are in memory twice. A parameter is
released after its module, unless it has been gathered ahead for a later module, too.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from slm_toolkit.model.model_spec import ModelSpec, layer_tensors
from slm_toolkit.predict.memory.zero_gradients import IN_BACKWARD
from slm_toolkit.predict.setup.adapters import Adapters, adapter_shapes
from slm_toolkit.strategy.settings import ZeroSettings


@dataclass(frozen=True)
class Gathered:
    """Elements of gathered parameters, flat buffers included, on each rank."""

    before_head: int
    "in forward, after the last layer and before the head"
    in_last_layer: int
    "the most in the forward of the last layer"
    in_loss: int
    at_head: int
    at_norm: int
    layers: tuple[tuple["During", ...], ...]
    "each layer's backward"

    @property
    def crowded_layer(self) -> int:
        """The upper layer of those at the begin of whose backward most elements are gathered."""
        most = [self.in_layer(layer, 0) for layer in range(len(self.layers))]
        return max(range(len(most)), key=lambda layer: (most[layer], layer))

    def in_layer(self, layer: int, made: float) -> int:
        """Return the gathered elements when `made` elements have gradients, and the next one is computed."""
        modules = self.layers[layer]
        return next(
            (module for module in modules if module.before <= made < module.after), modules[-1]
        ).elements


@dataclass(frozen=True)
class During:
    """The backward of a module: elements of its layer's gradients before and after, gathered elements."""

    before: int
    after: int
    elements: int


class Param(NamedTuple):
    """A parameter that is gathered; a tied head has the embedding's."""

    place: str
    layer: int | None
    num_elements: int


@dataclass(frozen=True)
class _Module:
    """A module that has parameters of its own, or other modules, or neither."""

    place: str
    layer: int | None = None
    params: tuple[Param, ...] = ()
    trained: int = 0
    "elements of its parameters that get gradients"
    children: tuple["_Module", ...] = ()
    recomputes: bool = False
    "backward computes it again: a checkpointed layer"
    in_backward: bool = True


@lru_cache(maxsize=128)
def gathered_of(
    spec: ModelSpec,
    adapters: Adapters | None,
    zero: ZeroSettings,
    *,
    recomputed: tuple[bool, ...],
) -> Gathered:
    """Return the gathered elements of a micro-step whose order of modules DeepSpeed knows already.

    `recomputed`: for each layer, whether backward computes it again.
    """
    model = _model_of(spec, adapters, zero, recomputed)
    order = [module for is_reached, module, _ in _walk(model) if is_reached]
    rank = _Rank(zero, deque((param, step) for step, module in enumerate(order) for param in module.params))
    most: dict[tuple[str, int | None, str], int] = {}
    layers: list[list[During]] = [[] for _ in range(spec.num_layers)]
    for is_reached, module, phase in _walk(model):
        if not is_reached:
            rank.leave(module)
            continue
        rank.reach(module)
        key = module.place, module.layer, phase
        most[key] = max(most.get(key, 0), rank.elements)
        if phase != "forward" and module.layer is not None:
            pass_ = layers[module.layer]
            before = pass_[-1].after if pass_ else 0
            after = before + module.trained * (phase == "backward")
            pass_.append(During(before, after, rank.elements))
    last = spec.num_layers - 1
    return Gathered(
        before_head=most["norm", None, "forward"],
        in_last_layer=max(most[key] for key in most if key[1:] == (last, "forward")),
        in_loss=most["lm_head", None, "forward"],
        at_head=most["lm_head", None, "backward"],
        at_norm=most["norm", None, "backward"],
        layers=tuple(map(tuple, layers)),
    )


def _model_of(
    spec: ModelSpec, adapters: Adapters | None, zero: ZeroSettings, recomputed: tuple[bool, ...]
) -> _Module:
    """Return the modules. Parameters that are on every rank always are left out.

    With adapters, backward only reaches the embedding, and the first layer's matrices on its output, if the
    first layer is checkpointed.
    """
    reaches_all = adapters is None or recomputed[0]

    def with_params(place: str, layer: int | None, size: int, *, is_trained: bool, reached: bool) -> _Module:
        params = (Param(place, layer, size),) if size > zero.stage3_param_persistence_threshold else ()
        return _Module(place, layer, params, size * is_trained, in_backward=reached)

    def of_matrix(place: str, layer: int, size: int) -> _Module:
        """A matrix; with LoRA it is followed by its dropout and the adapter's two matrices."""
        reached = reaches_all or layer > 0 or place not in ("q_proj", "k_proj", "v_proj", "qkv_proj")
        base = with_params(place, layer, size, is_trained=adapters is None, reached=reached)
        shapes = adapter_shapes(spec, adapters).get(place, ()) if adapters else ()
        if len(shapes) < 2:  # IA3's vector has no module of its own
            return replace(base, trained=base.trained + sum(map(prod, shapes)))
        lora = [
            with_params(f"{place}.lora_{letter}", layer, prod(shape), is_trained=True, reached=True)
            for letter, shape in zip("AB", shapes, strict=True)
        ]
        return _Module(place, layer, children=(base, _Module("lora_dropout", layer), *lora))

    vocabulary = {"is_trained": adapters is None}
    embed = with_params("embed_tokens", None, spec.embedding_params, **vocabulary, reached=reaches_all)
    head = with_params("lm_head", None, spec.embedding_params, **vocabulary, reached=True)
    if spec.tied:
        head = replace(head, params=embed.params)
    layers = [
        _Module("layer", number, children=_layer_modules(spec, number, of_matrix), recomputes=recomputes)
        for number, recomputes in enumerate(recomputed)
    ]
    rotary = _Module("rotary_emb", in_backward=False)
    base = _Module("model", children=(embed, rotary, *layers, _Module("norm")))
    return _Module("root", children=(base, head))


def _layer_modules(
    spec: ModelSpec, number: int, of_matrix: Callable[[str, int, int], _Module]
) -> tuple[_Module, ...]:
    """Return a layer's modules in the order of forward: norms, and two blocks of matrices."""
    tensors = layer_tensors(spec)
    sizes = dict.fromkeys((tensor.name for tensor in tensors), 0)
    sizes |= {tensor.name: tensor.num_elements for tensor in tensors if tensor.is_matrix}  # without biases
    modules: list[_Module] = []
    block: list[_Module] = []

    def end_block() -> None:
        if block:
            modules.append(_Module("block", number, children=tuple(block)))
            block.clear()

    for place in reversed(IN_BACKWARD):
        if place not in sizes:
            continue
        if place.endswith("layernorm"):
            end_block()
            modules.append(_Module(place, number))
        elif sizes[place]:
            block.append(of_matrix(place, number, sizes[place]))
            if place == "gate_proj":
                block.append(_Module("act_fn", number))
        else:  # the norm of the heads
            block.append(_Module(place, number))
    end_block()
    return tuple(modules)


def _walk(model: _Module) -> Iterator[tuple[bool, _Module, str]]:
    """Yield (True, module, phase) when a module is reached, (False, module, phase) when it is left.

    The phases are forward, backward, and `again`: the forward that backward recomputes.
    """
    yield from _forward(model, "forward")
    yield from _backward(model)


def _forward(module: _Module, phase: str) -> Iterator[tuple[bool, _Module, str]]:
    yield True, module, phase
    for child in module.children:
        yield from _forward(child, phase)
    yield False, module, phase


def _backward(module: _Module, recomputed: _Module | None = None) -> Iterator[tuple[bool, _Module, str]]:
    """Yield a module's backward. Recomputation begins in the first module that needs a saved tensor.

    It stops in the same module's forward, so that neither this module nor those around it are left. The
    layer itself is not reached again: the checkpoint is inside of it.
    """
    if not module.in_backward:
        return
    yield True, module, "backward"
    if recomputed is not None and not module.children:
        computed = [step for child in recomputed.children for step in _forward(child, "again")]
        while not computed[-1][0]:
            computed.pop()
        yield from computed
    recomputed = module if module.recomputes else recomputed
    for child in reversed(module.children):
        yield from _backward(child, recomputed)
        recomputed = None
    yield False, module, "backward"


@dataclass
class _Bucket:
    """Parameters that were gathered together."""

    flat: int
    "elements of the buffer they are copied out of; 0: a single parameter is a view of its buffer"
    waiting: set[Param]
    "parameters that no module has waited for"
    is_copied: bool = False


@dataclass
class _Rank:
    """The gathered parameters of a rank while modules are reached and left one after the other."""

    zero: ZeroSettings
    queue: deque[tuple[Param, int]]
    "parameters in the order of their uses, with the number of the using module"
    elements: int = 0
    "in memory"
    step: int = 0
    num_available: int = 0
    "elements that are gathered or on their way"
    gathered: dict[Param, _Bucket] = field(default_factory=dict)
    in_use: dict[Param, set[int]] = field(default_factory=dict)
    fetched_for: dict[Param, int] = field(default_factory=dict)
    "the last module for which a parameter was taken from the queue"

    def reach(self, module: _Module) -> None:
        """Gather what a module needs and what comes next: fetch_sub_module."""
        self._gather([param for param in module.params if param not in self.gathered])
        for param in module.params:
            self.in_use.setdefault(param, set()).add(id(module))
            self._wait(param)
        for _ in [param for param in module.params if self.fetched_for.get(param, -1) < self.step]:
            param, step = self.queue.popleft()
            self.fetched_for[param] = step
        free = self.zero.stage3_max_live_parameters - self.num_available
        room = min(free, self.zero.stage3_prefetch_bucket_size)
        ahead: list[Param] = []
        while self.queue and room > 0:
            param, step = self.queue.popleft()
            self.fetched_for[param] = max(step, self.fetched_for.get(param, -1))
            if param not in self.gathered and param not in ahead:
                ahead.append(param)
                room -= param.num_elements
        self._gather(ahead)
        self.step += 1

    def leave(self, module: _Module) -> None:
        """Release a module's parameters, unless they are needed by a later one: release_sub_module."""
        for param in module.params:
            self.in_use.get(param, set()).discard(id(module))
            bucket = self.gathered.get(param)
            is_here = bucket is not None and (bucket.is_copied or not bucket.flat)
            if is_here and not self.in_use.get(param) and self.fetched_for.get(param, -1) <= self.step:
                del self.gathered[param]
                self.num_available -= param.num_elements
                self.elements -= param.num_elements

    def _gather(self, params: list[Param]) -> None:
        """Start an all-gather: all_gather_coalesced."""
        num_elements = sum(param.num_elements for param in params)
        bucket = _Bucket(num_elements * (len(params) > 1), set(params))
        self.gathered |= dict.fromkeys(params, bucket)
        self.num_available += num_elements
        self.elements += num_elements

    def _wait(self, param: Param) -> None:
        """Copy a bucket out of its flat buffer, and free the buffer if nothing else waits for it."""
        bucket = self.gathered[param]
        if bucket.flat and not bucket.is_copied:
            bucket.is_copied = True
            self.elements += bucket.flat
        bucket.waiting.discard(param)
        if not bucket.waiting and bucket.flat:
            self.elements -= bucket.flat
            bucket.flat = 0
