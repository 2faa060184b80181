"""HLO's names of element types, the keys of peaks and efficiencies in descriptions of devices."""

import difflib
import re
from collections.abc import Mapping

DTYPES = (
    *("pred", "s2", "s4", "s8", "s16", "s32", "s64", "u2", "u4", "u8", "u16", "u32", "u64"),
    *(
        "f4e2m1fn",
        "f8e3m4",
        "f8e4m3",
        "f8e4m3fn",
        "f8e4m3fnuz",
        "f8e4m3b11fnuz",
        "f8e5m2",
        "f8e5m2fnuz",
        "f8e8m0fnu",
    ),
    *("bf16", "f16", "f32", "f64", "c64", "c128"),
)


def check_dtypes[Value](by_dtype: Mapping[str, Value], field: str) -> None:
    """Check that keys are HLO's names of types.

    Args:
        by_dtype: the mapping to check.
        field: what errors call the mapping.

    Raises:
        ValueError: a key is another name, such as NumPy's; the message suggests HLO's.
    """
    for name in by_dtype:
        if name not in DTYPES:
            meant = re.sub(r"^bfloat", "bf", name.lower())
            meant = re.sub(r"^uint", "u", re.sub(r"^float", "f", re.sub(r"^int", "s", meant)))
            close = [meant] if meant in DTYPES else difflib.get_close_matches(meant, DTYPES, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"{field}: unknown type {name!r}; {hint}expected HLO's names: {', '.join(DTYPES)}"
            )
