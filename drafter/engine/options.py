"""Options that commands share: which target runs where, and how tokens are drafted. Imports no torch."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from drafter.engine.config import EngineConfig
from drafter.engine.defaults import NO_FILE, check_method, default_drafter
from drafter.proposers.options import DraftOptions, Method, TreePolicy
from drafter.utils.validate import check_ranges, within

if TYPE_CHECKING:
    from drafter.engine.defaults import Choice
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Runtime = Literal["auto", "torch", "openvino"]
Quantization = Literal["none", "int8"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The target, its number format and its device.

    Attributes:
        target: alias, hub id, folder or .gguf file of the language model
        dtype: number format of the models (default: auto, which is bfloat16 on CUDA and float32 elsewhere)
        device: auto, cpu, cuda or cuda:1
        compile: compile the steps with torch.compile (default: on CUDA only)
        runtime: runtime of the target's forward; auto: OpenVINO for bfloat16 on a CPU if OpenVINO is installed and can
            run the target, else torch
        device_map: spread the target's layers over devices, main memory and disk: auto, or a YAML or JSON file with the
            device of every module (a number, cpu or disk)
        quantization: rounding of the target's weights after loading; int8: the text is the rounded target's
        revision: hub revision of the target
        trust_remote_code: run code of a hub model
    """

    target: str
    dtype: Dtype = "auto"
    device: str = "auto"
    compile: bool | None = None
    runtime: Runtime = "auto"
    device_map: str | None = None
    quantization: Quantization = "none"
    revision: str | None = None
    trust_remote_code: bool = False

    def load(self, name: str | None = None, *, pack: bool = True) -> "Target":
        """The target, or another model with the same dtype and device (ValueError if it cannot be loaded)."""
        from drafter.engine.loading import load_target

        if self.compile and self.runtime == "openvino":
            raise ValueError("--compile compiles torch's steps: leave it out, or give --runtime torch")
        if self.device_map is not None and (self.compile or self.runtime == "openvino"):
            flag = "--compile" if self.compile else "--runtime openvino"
            raise ValueError(f"--device-map {self.device_map} runs torch without compilation: leave {flag} out")
        is_target = name in (None, self.target)
        return load_target(
            name or self.target, dtype=self.dtype, device=self.device, revision=self.revision if is_target else None,
            trust_remote_code=self.trust_remote_code, pack=pack and not self.compile, runtime=self.runtime,
            **(self.spread if is_target else {}),
            quantization=self.quantization if is_target else "none",
        )  # fmt: skip

    @property
    def spread(self) -> dict[str, Any]:
        """Further arguments of loading the target: how it is spread over devices."""
        return {"device_map": self.device_map}


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(RunOptions):
    """Which target runs, and on how many devices.

    Attributes:
        tensor_parallel: processes that run the target together, one for each device, each with its share of every
            layer; torchrun starts them
    """

    tensor_parallel: int = within(1, low=1, high=1024)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.tensor_parallel > 1 and self.device_map is not None:
            raise ValueError("--tensor-parallel and --device-map both spread the target: give one of them")
        if self.tensor_parallel > 1 and (self.compile or self.runtime == "openvino"):
            flag = "--compile" if self.compile else "--runtime openvino"
            raise ValueError(
                f"--tensor-parallel {self.tensor_parallel} runs torch without compilation: leave {flag} out"
            )

    @property
    def spread(self) -> dict[str, Any]:
        return {**super().spread, "num_ranks": self.tensor_parallel}


@dataclass(frozen=True, kw_only=True)
class DraftingOptions(DraftOptions, ParallelOptions):
    """How tokens are drafted. Fields that are None are chosen by :func:`drafter.engine.defaults.choose`.

    Attributes:
        drafter: folder of an exported drafter, hub id, or name of a drafter that comes with the package (default: the
            target's own drafter where the package has one; none: no drafter)
        draft_model: smaller model with the target's tokenizer, for --method draft-model
        speculation: draft tokens; --no-speculation decodes one token per target forward
        tuned: file of `drafter tune` that sizes the trees (default: the drafter's own file if the file fits this
            machine; none: no measured sizes)
        method: how tokens are drafted (default: the method of the measured sizes; else draft-model with --draft-model,
            drafter with a drafter; without models that draft, lookup on a CPU and none on CUDA)
        beam_width: W, beams kept at each drafting step (default: chosen for the device)
        draft_length: L, drafting steps (default: chosen for the device)
        tree_size: N, nodes that the target verifies in one forward, root included (default: chosen for the device)
        tree_policy: keep the N-1 likeliest nodes of all drafting steps, or the W final beams as published (default:
            all-nodes)
    """

    drafter: str | None = None
    draft_model: str | None = None
    speculation: bool = True
    tuned: str | None = None
    method: Method | None = None  # type: ignore[assignment]
    beam_width: int | None = None  # type: ignore[assignment]
    draft_length: int | None = None  # type: ignore[assignment]
    tree_policy: TreePolicy | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        ParallelOptions.__post_init__(self)
        if self.tensor_parallel > 1 and self.tuned not in (None, NO_FILE):
            raise ValueError(
                f"--tuned {self.tuned} was measured in one process: leave --tuned or --tensor-parallel out"
            )
        if not self.speculation and self.method not in (None, "none"):
            raise ValueError(f"--no-speculation drafts nothing: leave out --no-speculation or --method {self.method}")
        check_method(
            self.method_given,
            has_drafter=self.drafter_used is not None,
            has_draft_model=self.draft_model is not None,
            tuned=self.tuned,
        )
        given = {name: value for name, value in self.draft_fields.items() if value is not None}
        tuned = {} if self.tuned in (None, NO_FILE) else {"tuned": self.tuned}
        EngineConfig(**{"method": "drafter", **given, **tuned})

    @property
    def method_given(self) -> Method | None:
        """The method that was named; ``--no-speculation`` names none."""
        return self.method if self.speculation else "none"

    @property
    def drafter_used(self) -> str | None:
        """The drafter to load; None where the method uses none, or the package has none for the target."""
        return default_drafter(self.target or "", self.drafter, method=self.method_given, draft_model=self.draft_model)

    @property
    def draft_model_used(self) -> str | None:
        """The draft model to load; None for another method."""
        return self.draft_model if self.method_given in (None, "draft-model") else None

    @property
    def draft_fields(self) -> dict[str, Any]:
        """The engine's settings of drafting; None is open."""
        return {item.name: getattr(self, item.name) for item in fields(DraftOptions)} | {"method": self.method_given}


class Models(NamedTuple):
    """The loaded models of a command; ``drafter`` and ``draft_model`` are None if the method uses none."""

    target: "Target"
    drafter: "RecurrentDrafter | None"
    draft_model: "Target | None"

    def choose(self, options: DraftingOptions, **engine: Any) -> "Choice":
        """Settings of an engine for ``options``; ``engine``: further fields of EngineConfig."""
        from drafter.engine.defaults import choose

        given = {**options.draft_fields, "compile": options.compile, **engine}
        return choose(self.target, self.drafter, draft_model=self.draft_model, given=given, tuned=options.tuned)


def load_models(options: DraftingOptions) -> Models:
    """The target, and the drafter or draft model that ``options`` ask for (ValueError if one cannot be loaded)."""
    from drafter.engine.loading import load_drafter

    target = options.load()
    drafter = load_drafter(options.drafter_used, target) if options.drafter_used is not None else None
    return Models(target, drafter, options.load(options.draft_model_used) if options.draft_model_used else None)
