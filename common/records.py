"""Types of flags and of the fields in JSON files, with their limits, as msgspec checks them."""

from typing import Annotated, Literal

from msgspec import Meta

Auto = Literal["auto"]  # a value that is chosen, or follows from others
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Share = Annotated[float, Meta(ge=0, le=1)]
Size = Annotated[int, Meta(gt=0, le=1 << 24)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 24)]
FileName = Annotated[str, Meta(pattern=r"\A\w[\w.-]*\Z")]  # in the same directory
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
