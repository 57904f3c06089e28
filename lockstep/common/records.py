"""Types of flags and JSON fields, with the limits that msgspec checks."""

from typing import Annotated, Literal

from msgspec import Meta

try:
    import tyro.conf

    FileOnly = tyro.conf.Suppress  # FileOnly[int]: a setting of preset files that is not a flag
except ModuleNotFoundError:  # bench/gpu.py reads presets where tyro is not installed

    class FileOnly:
        """Marks a setting of preset files that is not a flag."""

        def __class_getitem__(cls, kind):
            return Annotated[kind, cls]


Auto = Literal["auto"]  # chosen for the user, or derived from other values
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Share = Annotated[float, Meta(ge=0, le=1)]
Size = Annotated[int, Meta(gt=0, le=1 << 24)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 24)]
FileName = Annotated[str, Meta(pattern=r"\A\w[\w.-]*\Z")]  # a name without a directory
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
