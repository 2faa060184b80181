"""Damaged HLO text is read or refused with the line and what the parser expected there."""

import re
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.hlo import HloError, parse_hlo, temporary_memory
from simulator.work import unmodelled_kernels
from tests.simulator.test_hlo import ADD, DATA, DIMENSIONS, module, parse

P, Q = "%p = f32[4]{0} parameter(0)", "%q = f32[4,4]{1,0} parameter(1)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "HloModule m\nENTRY %main {\n  %p = f32[4]{0} parameter(0)\n",
            "line 2, computation %main: does not end",
        ),
        ("HloModule m\nENTRY %main {\n}\n", "line 2, computation %main: has no instructions"),
        ("HloModule m\n%a {\nENTRY %main {\n}\n", "%a: goes on where line 3 begins another one"),
        ("HloModule m\n  %p = f32[4]{0} parameter(0)\n", "line 2, %p = .*is in no computation"),
        (module(P, computations=ADD + ADD), "computation %add: was there before"),
        (module(P, P), "line 11, %p = .*line 10 has the same name"),
        (
            module("%n = f32[4]{0} negate(%m)", P),
            "line 10, %n = .*operand %m is nothing that %main computes above it",
        ),
        (module("%n = f32[4]{0} negate(%n)"), "operand %n is nothing"),
        (module("%p = f32[4=2]{0} parameter(0)"), r"line 10: shape f32\[4=2\] is not understood"),
        (module("%p = f7[4]{0} parameter(0)"), "line 10: unknown element type 'f7'"),
    ],
)
def test_an_invalid_module_is_refused_with_the_line(text: str, message: str) -> None:
    for read in (parse_hlo, temporary_memory):
        with pytest.raises(HloError, match=message):
            read(text)


CONDITIONAL = "%r = f32[4]{0} conditional(%i, %p), branch_computations={%add, %absent}"
DOT = "%r = f32[4,4]{1,0} dot(%q, %q), lhs_contracting_dims={2}, rhs_contracting_dims={0}"
CUBLAS = (
    "%r = (f32[4,4]{1,0}, s8[8]{0}) custom-call(%q), "
    'custom_call_target="__cublas$gemm", backend_config={'
    f'"gemm_backend_config":{{{DIMENSIONS % ("1", "0", "", "")}}}}}'
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (CONDITIONAL, "branch_computations= names no computation above it, but 'absent'"),
        (
            "%r = f32[4]{0} call(%p), to_apply=%main",
            "to_apply= names no computation above it, but 'main'",
        ),
        ("%r = f32[4]{0} call(%p)", "to_apply= names no computation above it, but ''"),
        (DOT, r"contracts or batches dims \(2,\) of an operand of shape \(4, 4\)"),
        (DOT.replace("(%q, %q)", "(%q)"), "its operands are q; expected 2 or more"),
        (CUBLAS, "its operands are q; expected 2 or more"),
        (
            "%r = f32[4,4]{1,0} ragged-dot(%q, %q), rhs_group_dims={0}",
            "its operands are q, q; expected 3 or more",
        ),
        (
            "%r = f32[4,4]{1,0} ragged-dot(%q, %q, %p), rhs_group_dims={5}",
            r"dims \(5,\) of an operand of shape \(4, 4\)",
        ),
        ("%r = f32[4]{0} dynamic-update-slice(%p)", "its operands are p; expected 2 or more"),
        (
            "%r = f32[4]{0} scatter(%p, %i), to_apply=%add",
            "its operands are p, i; expected 3 or more",
        ),
        ("%r = f32[4]{0} sort(), to_apply=%add", "its operands are none; expected 1 or more"),
        (
            "%r = f32[4]{0} all-gather-done(%p)",
            "waits for nothing; expected an operand that some ...-start computes",
        ),
        (
            "%r = f32[4,4]{1,0} convolution(%q, %q), window={size=1}, dim_labels=bf01_oi01->bf01",
            r"call the filter's dims 'oi01'; its shape is \(4, 4\)",
        ),
    ],
)
def test_the_error_of_an_invalid_instruction_shows_it(line: str, message: str) -> None:
    text = module(P, Q, "%i = s32[] parameter(2)", line)
    with pytest.raises(HloError, match=f"^HLO line 13, %r = .*{message}"):
        parse_hlo(text)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("replica_groups=[3,3]<=[8]", r"can't be read: cannot reshape array of size 8"),
        ("replica_groups=[3,3]<=[9]", "given groups of 9 devices; expected 1 to 8"),
        (
            "replica_groups=[99999,99999]<=[9999999999]",
            "given groups of 9999999999 devices; expected 1 to 8",
        ),
        ("replica_groups=mesh['x'=8] {'z'}", "the mesh has no axis 'z', but 'x'"),
        ("replica_groups=mesh['x'=8] {'x':(3)2}", r"axis 'x' of size 8 has no part \(3\)2"),
        ("replica_groups=mesh['x'=16] {'x'}", "given groups of 16 devices; expected 1 to 8"),
        ("replica_groups=[4]", "the notation is not known"),
        (
            "replica_groups={{0,8}}",
            r"have \(0, 8\) among them; expected different devices from 0 to 7",
        ),
        ("replica_groups={{0,0}}", r"have \(0, 0\) among them; expected different devices"),
        ("replica_groups={{}}", r"have \(\) among them; expected different devices"),
        (
            "source_target_pairs={{0,1,2}}",
            r"have \(0, 1, 2\) among them; expected pairs of devices",
        ),
    ],
)
def test_the_error_of_invalid_device_groups_shows_them(groups: str, message: str) -> None:
    with pytest.raises(HloError, match=f"^HLO line 11, %r = all-reduce.*device groups .*{message}"):
        parse(P, f"%r = f32[4]{{0}} all-reduce(%p), {groups}, to_apply=%add")


def test_an_asynchronous_pair_of_unknown_cost_is_counted_once() -> None:
    sent = (
        P,
        "%t = token[] after-all()",
        "%s = (f32[4]{0}, u32[], token[]) send(%p, %t), channel_id=1",
        "%d = token[] send-done(%s), channel_id=1",
        "%r = (f32[4]{0}, u32[], token[]) recv(%t), channel_id=1",
        "%e = (f32[4]{0}, token[]) recv-done(%r), channel_id=1",
        "%u = f32[4]{0} frobnicate-start(%p)",
        "%v = f32[4]{0} frobnicate-done(%u)",
    )
    assert unmodelled_kernels(parse(*sent)) == {"send": 1, "recv": 1, "frobnicate-start": 1}


def test_the_error_of_a_tuple_element_without_index_shows_it() -> None:
    text = module(P, "%t = (f32[4]{0}) tuple(%p)", "ROOT %g = f32[4]{0} get-tuple-element(%t)")
    with pytest.raises(
        HloError, match=r"line 12, %g = .*does not say which element; expected e\.g\. index=0"
    ):
        temporary_memory(text)


# Arbitrary damage

SAMPLES = {path.name.split(".")[0]: path.read_text() for path in DATA.glob("*.hlo.txt")}
_TOKEN = re.compile(r"[\w.]+|[^\w\s]|\s+")


@st.composite
def damaged_texts(draw: st.DrawFn) -> str:
    """Draw a sample with one to three of its lines or words removed, doubled or replaced."""
    text = SAMPLES[draw(st.sampled_from(sorted(SAMPLES)))]
    for _ in range(draw(st.integers(1, 3))):
        parts = draw(st.sampled_from([text.splitlines(keepends=True), _TOKEN.findall(text)]))
        indices = st.integers(0, len(parts) - 1)
        position = draw(indices)
        parts[position] = draw(st.sampled_from(["", 2 * parts[position], parts[draw(indices)]]))
        text = "".join(parts)
    return text


@given(damaged_texts())
@settings(max_examples=300, deadline=None)
def test_damaged_text_is_read_or_refused(text: str) -> None:
    for read in (parse_hlo, temporary_memory):
        with suppress(HloError):
            read(text)


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_text_that_is_cut_off_is_refused(name: str, data: st.DataObject) -> None:
    text = SAMPLES[name]
    cut = data.draw(st.integers(0, len(text.rstrip()) - 1))
    with pytest.raises(HloError):
        parse_hlo(text[:cut])
