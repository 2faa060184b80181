"""Liveness at peak: a program's bytes by role, counted by hand (an `f32[4]` has 16)."""

from simulator.hlo import parse_hlo, temporary_memory
from simulator.hlo.liveness import op_temporaries
from simulator.live_ranges import fullest
from simulator.memory import Role
from tests.simulator.test_hlo import ADD, DATA, module


def named(name: str) -> str:
    return f'metadata={{op_name="jit(f)/{name}/mul"}}'


FORWARD, BACKWARD, UPDATE = map(named, ("jvp(f)", "transpose(jvp(f))", "sgd"))


def roles_at_peak(*lines: str, computations: str = ADD) -> dict[Role, float]:
    text = module("%p = f32[4]{0} parameter(0)", *lines, computations=computations)
    return dict(fullest(temporary_memory(text).values()))


def test_forward_values_that_the_backward_pass_reads_are_activations() -> None:
    assert roles_at_peak(
        f"%a = f32[4]{{0}} negate(%p), {FORWARD}",
        f"%b = f32[2]{{0}} slice(%a), {FORWARD}",
        f"%c = f32[4]{{0}} multiply(%a, %b), {BACKWARD}",
        f"ROOT %r = f32[4]{{0}} subtract(%p, %c), {UPDATE}",
    ) == {"activations": 16 + 8, "gradients": 16}  # %b lives until %c is computed


def test_forward_values_that_only_the_next_kernel_reads_are_temporary() -> None:
    assert roles_at_peak(
        f"%a = f32[4]{{0}} negate(%p), {FORWARD}",
        f"%b = f32[4]{{0}} negate(%a), {FORWARD}",
        f"ROOT %r = f32[4]{{0}} negate(%b), {FORWARD}",
    ) == {"temporaries": 32}


def test_arguments_and_results_have_no_role() -> None:
    lines = "%a = f32[4]{0} negate(%p)", "%b = f32[4]{0} bitcast(%a)"
    assert roles_at_peak(*lines, "ROOT %t = (f32[4]{0}, f32[4]{0}) tuple(%p, %b)") == {}


def test_partial_gradients_before_their_all_reduce_are_gradients() -> None:
    reduce = "replica_groups={}, to_apply=%add"
    assert roles_at_peak(
        f"%g = f32[4]{{0}} negate(%p), {BACKWARD}",
        f"%s = f32[4]{{0}} all-reduce(%g), {reduce}, {BACKWARD}",
        f"ROOT %r = f32[4]{{0}} subtract(%p, %s), {UPDATE}",
    ) == {"gradients": 32}


def test_gathered_copies_are_communication_from_the_start_of_their_gather() -> None:
    assert roles_at_peak(
        "%s = (f32[4]{0}, f32[32]{0}) all-gather-start(%p), replica_groups={}, dimensions={0}",
        "%k = f32[4]{0} negate(%p)",
        "%d = f32[32]{0} all-gather-done(%s)",
        f"ROOT %r = f32[4]{{0}} subtract(%d, %k), {FORWARD}",
    ) == {"communication": 128, "temporaries": 16}


def test_a_result_that_aliases_an_operand_needs_no_memory() -> None:
    over = 'custom_call_target="f", output_to_operand_aliasing={{0}: (1, {})}'
    assert roles_at_peak(
        f"%a = f32[4]{{0}} negate(%p), {FORWARD}",
        f"%c = (f32[4]{{0}}, s8[8]{{0}}) custom-call(%p, %a), {over}, {FORWARD}",
        "%g = f32[4]{0} get-tuple-element(%c), index=0",
        f"ROOT %r = f32[4]{{0}} negate(%g), {FORWARD}",
    ) == {"temporaries": 16 + 8}


LOOP = """
%body (c: (f32[4], f32[4])) -> (f32[4], f32[4]) {
  %c = (f32[4]{0}, f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%c), index=0
  %total = f32[4]{0} get-tuple-element(%c), index=1
  %t = f32[6]{0} custom-call(%x), FORWARD
  %g = f32[4]{0} custom-call(%t), BACKWARD
  %sum = f32[4]{0} add(%g, %total), UPDATE
  ROOT %n = (f32[4]{0}, f32[4]{0}) tuple(%x, %sum)
}

%condition (c: (f32[4], f32[4])) -> pred[] {
  %c = (f32[4]{0}, f32[4]{0}) parameter(0)
  ROOT %t = pred[] constant(true)
}
"""


def test_a_loop_has_its_carry_and_the_values_of_one_iteration() -> None:
    loop = LOOP.replace("FORWARD", FORWARD).replace("BACKWARD", BACKWARD).replace("UPDATE", UPDATE)
    assert roles_at_peak(
        '%z = f32[4]{0} broadcast(), metadata={op_name="jit(f)/zeros"}',
        "%i = (f32[4]{0}, f32[4]{0}) tuple(%p, %z)",
        "%w = (f32[4]{0}, f32[4]{0}) while(%i), condition=%condition, body=%body, "
        'metadata={op_name="jit(f)/while"}',
        "%sum = f32[4]{0} get-tuple-element(%w), index=1",
        f"ROOT %r = f32[4]{{0}} subtract(%p, %sum), {UPDATE}",
        computations=loop,
    ) == {"gradients": 16 + 16, "activations": 24}


def test_each_op_has_the_memory_of_its_instruction_and_a_loop_of_its_fullest() -> None:
    loop = LOOP.replace("FORWARD", FORWARD).replace("BACKWARD", BACKWARD).replace("UPDATE", UPDATE)
    text = module(
        "%p = f32[4]{0} parameter(0)",
        "%z = f32[4]{0} negate(%p)",
        "%i = (f32[4]{0}, f32[4]{0}) tuple(%p, %z)",
        "%w = (f32[4]{0}, f32[4]{0}) while(%i), condition=%condition, body=%body, "
        'metadata={op_name="jit(f)/while"}, backend_config={"known_trip_count":{"n":"3"}}',
        "%sum = f32[4]{0} get-tuple-element(%w), index=1",
        "%a = f32[8]{0} pad(%sum)",
        "%s = f32[8]{0} all-reduce-start(%a), replica_groups={}, to_apply=%add",
        "%d = f32[8]{0} all-reduce-done(%s)",
        "ROOT %r = f32[4]{0} slice(%d)",
        computations=ADD + loop,
    )
    totals = [
        sum(level.values()) for level in op_temporaries(parse_hlo(text), temporary_memory(text))
    ]
    # z; the loop, with its carry z, t and g; a beside the sum; the start and the end of s; r is a
    # result
    assert totals == [16, 56, 48, 64, 64, 32]


def test_compiled_programs_have_roles_and_their_peak_is_while_an_op_runs() -> None:
    for path in DATA.glob("*.hlo.txt"):
        text = path.read_text()
        memory = temporary_memory(text)
        peak = sum(fullest(memory.values()).values())
        levels = op_temporaries(parse_hlo(text), memory)
        assert max(sum(level.values()) for level in levels) == peak > 0
