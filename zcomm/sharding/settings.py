"""Settings: checked when constructed; all ranks must have the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase

import torch

from zcomm.base import arguments
from zcomm.codecs import Codec, codec
from zcomm.sharding.chunks import ChunkSize, TwoHops, best_chunk_size
from zcomm.sharding.feedback import checked_decay
from zcomm.sharding.hierarchy import FOUND, Hierarchy, Hosts
from zcomm.sharding.residual_store import Mode

# A codec's spec, or a dict that maps patterns of parameter names to specs.
Codecs = str | Codec | Mapping[str, str | Codec]
# In place of a spec: zcomm.engine.tuning chooses one before the first step.
AUTO = "auto"
_CHOSEN = "lm4"
PLAIN = codec("none")
# The codec that sends each dtype exactly.
EXACT = {
    torch.float32: PLAIN,
    torch.float64: PLAIN,
    torch.bfloat16: codec("bf16"),
    torch.float16: codec("fp16"),
}
_LEAST_CHUNK_MB, _MOST_CHUNK_MB = 1 / 16, 1024
_NOT_COMPARED = ("threads",)  # changes the speed, not the result


@dataclass(frozen=True)
class Settings:
    """The checked settings of `zcomm.compress`, which describes them."""

    codec: Codecs | Hierarchy = AUTO
    feedback: bool | float | None = None
    start_step: int = 0
    chunk_mb: float | None = None
    timeout_s: float | None = None
    verify: bool = True
    min_numel: int = 1024
    residual_dtype: torch.dtype | str = torch.float32
    threads: int | None = None
    hierarchy: Hierarchy | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if isinstance(self.codec, Hierarchy):
            object.__setattr__(self, "hierarchy", self.codec)
            object.__setattr__(self, "codec", self.codec.across)
        object.__setattr__(self, "codec", _checked_codecs(self.codec))
        object.__setattr__(self, "feedback", _checked_feedback(self.feedback))
        for name in ("start_step", "min_numel"):
            object.__setattr__(self, name, arguments.count(getattr(self, name), name))
        if self.chunk_mb is not None:
            _expect_number("chunk_mb", self.chunk_mb, _LEAST_CHUNK_MB)
            if self.chunk_mb > _MOST_CHUNK_MB:
                raise ValueError(
                    f"chunk_mb: expected at most {_MOST_CHUNK_MB}, got {self.chunk_mb}: each rank "
                    "holds several chunks in memory, and nothing overlaps if all fits in one; omit "
                    "it for the best size"
                )
        if self.timeout_s is not None:
            _expect_number("timeout_s", self.timeout_s, 0.1)
        if not isinstance(self.verify, bool):
            raise TypeError(f"verify: expected a bool, got {arguments.describe(self.verify)}")
        residual_dtype = arguments.dtype_of(self.residual_dtype, "residual_dtype")
        object.__setattr__(self, "residual_dtype", residual_dtype)
        if self.residual_dtype not in arguments.RESIDUAL_DTYPES:
            known = arguments.dtype_names(arguments.RESIDUAL_DTYPES)
            raise ValueError(f"residual_dtype: expected {known}, got {self.residual_dtype}")
        arguments.thread_count(self.threads)
        for used in self.codecs():
            mode = self.mode(used)
            if self.residual_dtype is torch.int8 and isinstance(mode, float):
                raise ValueError(
                    f"residual_dtype: expected torch.float32 or torch.bfloat16 with a decay, got "
                    f"torch.int8 with feedback={mode} for codec {used.spec!r}; use feedback=True"
                )

    @property
    def residual_storage(self) -> torch.dtype:
        return arguments.dtype_of(self.residual_dtype, "residual_dtype")

    def chunk_size(self, world_size: int) -> ChunkSize:
        if self.chunk_mb is None:
            return best_chunk_size(world_size)
        return ChunkSize.of_mb(self.chunk_mb)

    def two_hops(self, hosts: Hosts | None) -> TwoHops | None:
        """How to make chunks for hosts, if there are several, and several ranks on one."""
        if hosts is None:
            return None
        return TwoHops(hosts, (self.hierarchy or FOUND).local_codec)

    def codecs_by_pattern(self) -> dict[str, str]:
        assert isinstance(self.codec, dict)
        return self.codec

    def codecs(self) -> list[Codec]:
        """Those that are given; in place of "auto", one of those that it chooses from."""
        return [codec(_CHOSEN if s == AUTO else s) for s in self.codecs_by_pattern().values()]

    @property
    def is_auto(self) -> bool:
        """Whether a codec is still to be chosen."""
        return AUTO in self.codecs_by_pattern().values()

    def chosen(self, spec: str, chunk_mb: float | None = None) -> "Settings":
        """The same with a codec in place of "auto", and with a size of chunks if none was given."""
        codecs = {p: spec if s == AUTO else s for p, s in self.codecs_by_pattern().items()}
        codec = replace(self.hierarchy, across=codecs) if self.hierarchy else codecs
        return replace(self, codec=codec, chunk_mb=self.chunk_mb or chunk_mb)

    def codec_of(self, name: str, numel: int) -> Codec:
        """The codec of a parameter; refuses a name that no pattern matches."""
        return codec(self.spec_of(name, numel))

    def spec_of(self, name: str, numel: int) -> str:
        """The same, as it was given: perhaps "auto"."""
        for pattern, spec in self.codecs_by_pattern().items():
            if fnmatchcase(name, pattern):
                return PLAIN.spec if numel < self.min_numel else spec
        patterns = ", ".join(map(repr, self.codecs_by_pattern()))
        raise ValueError(
            f"codec: expected a pattern that matches parameter {name!r}, got {patterns}; "
            "add '*' as the last one"
        )

    def lossy_codec_of(self, name: str, numel: int) -> Codec | None:
        """The codec of a parameter; None if it is "none": the parameter is sent exactly."""
        found = self.codec_of(name, numel)
        return None if found.name == "none" else found

    def mode(self, used: Codec) -> Mode:
        """How residuals of a codec are fed back."""
        if used.name == "none":
            return False
        if self.feedback is None:
            return used.default_feedback
        if self.feedback is False and used.needs_feedback:
            raise ValueError(
                f"feedback: expected True or a decay with codec {used.spec!r}, got False: it "
                "leaves out so much that it needs feedback"
            )
        return self.feedback

    def compared(self) -> dict[str, str]:
        """The settings that must be the same on all ranks, as text."""
        texts = {name: _text(getattr(self, name)) for name in SETTING_NAMES}
        texts["hierarchy"] = (self.hierarchy or FOUND).compared()
        return {name: text for name, text in texts.items() if name not in _NOT_COMPARED}


def of_parameters(codec: Codecs, min_numel: int) -> Settings:
    """The settings of `param_codec`."""
    made = Settings(codec, min_numel=min_numel)
    if made.is_auto:
        raise ValueError(
            "param_codec: expected a codec, got 'auto', which chooses for gradients only; omit it "
            "for exact parameters, or give a codec, such as 'int8'"
        )
    return made


SETTING_NAMES = tuple(f.name for f in fields(Settings) if f.init)


def expect_same(everyone: Sequence[Mapping[str, str]], rank: int) -> None:
    """Refuses settings that differ; every rank raises an error that names all values."""
    for name in sorted({key for settings in everyone for key in settings}):
        values = [settings.get(name, "missing") for settings in everyone]
        if len(set(values)) > 1:
            each = ", ".join(f"rank {r}: {value}" for r, value in enumerate(values))
            raise ValueError(
                f"rank {rank}: expected the same {name} on all ranks, got {each}; "
                "give all ranks the same value"
            )


def _checked_codecs(given: object) -> dict[str, str]:
    """Patterns and specs; a single spec is the pattern "*"."""
    if isinstance(given, (str, Codec)):
        given = {"*": given}
    if not isinstance(given, Mapping):
        raise TypeError(
            "codec: expected a spec such as 'lm4', or a dict of name patterns and specs, got "
            f"{arguments.describe(given)}"
        )
    if not given:
        raise ValueError("codec: expected at least one pattern, got an empty dict; add '*': 'lm4'")
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(f"codec: expected patterns as str, got {arguments.describe(pattern)}")
    return {pattern: AUTO if spec == AUTO else codec(spec).spec for pattern, spec in given.items()}


def _checked_feedback(given: object) -> bool | float | None:
    return given if given is None or isinstance(given, bool) else checked_decay(given)


def _expect_number(name: str, value: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {arguments.describe(value)}")
    if not least <= value < float("inf"):
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _text(value: object) -> str:
    return repr(float(value)) if isinstance(value, float) else repr(value)
