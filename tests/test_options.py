"""The records of options and arguments: signatures, docstrings and commands have their names and their defaults."""

import re
from contextlib import suppress
from dataclasses import MISSING, fields
from importlib import import_module
from inspect import Parameter, cleandoc, signature

import pytest

import mpiattn
from mpiattn.arguments.biases import BiasArguments
from mpiattn.arguments.documents import DocumentArguments
from mpiattn.console.parser import Parser
from mpiattn.decode.options import CacheOptions, DecodeArguments
from mpiattn.plan import one_call
from mpiattn.plan.options import Options
from mpiattn.problem.byte_counts import byte_count
from mpiattn.problem.problem import Problem

PLAN = mpiattn.MeshAttention
CALLS_WITH_DOCUMENTS = [PLAN.forward, PLAN.backward, PLAN.verify]
CALLS_WITH_BIASES = [PLAN.forward, PLAN.backward, PLAN.verify]
DECODING = [mpiattn.tree_decode, mpiattn.ring_decode, mpiattn.query_ring_decode]


def parameters(function):
    """{name: default} of the keywords of a function, Parameter.empty for those that are needed."""
    given = signature(function).parameters.values()
    return {each.name: each.default for each in given if each.kind == Parameter.KEYWORD_ONLY}


def defaults(*records):
    """The same of the fields of records."""
    of_all = {}
    for record in records:
        if hasattr(record, "_field_defaults"):
            of_fields = {name: record._field_defaults.get(name, MISSING) for name in record._fields}
        else:
            of_fields = {each.name: each.default for each in fields(record)}
        of_all |= {name: Parameter.empty if default is MISSING else default for name, default in of_fields.items()}
    return of_all


def documented(function):
    """{name: the line with its type and default} of the section Parameters of a docstring."""
    section = re.search(r"\nParameters\n-+\n(.*?)(\n\n\w+\n---|\Z)", cleandoc(function.__doc__), re.S)[1]
    heads = [line for line in section.splitlines() if line and not line.startswith(" ")]
    return {name.strip(" *"): head for head in heads for name in head.split(" : ")[0].split(",")}


@pytest.mark.parametrize(
    "function, records",
    [(PLAN, (Problem, Options)), (mpiattn.KVCache, (CacheOptions,)), (mpiattn.tree_decode, (DecodeArguments,))],
    ids=["MeshAttention", "KVCache", "tree_decode"],
)
def test_arguments_are_those_of_the_records(function, records):
    of_records = defaults(*records)
    if function is mpiattn.tree_decode:
        of_records["algorithm"] = "auto"  # the rings have none
    assert parameters(function) == of_records


def test_no_name_is_in_both_records_of_a_plan():
    assert not set(defaults(Problem)) & set(defaults(Options))


@pytest.mark.parametrize(
    "name, wrong",
    {
        "tile": "2x2",
        "layout": "heap",
        "mesh_layout": "heap",
        "schedule": "lazy",
        "route": "scenic",
        "direction": "sideways",
        "transport": "pigeons",
        "max_message": 0,
        "max_memory": "much",
        "overlap": 2,
        "timeout": -1,
        "expected_cu_seqlens": [0, 4, 3],
    }.items(),
)
def test_a_wrong_option_is_named(name, wrong):
    with pytest.raises(mpiattn.ArgumentError, match=f"^{name} is "):
        Options(**{name: wrong}).checked(Problem(seqlen=4, heads=2, head_dim=8), 1)


@pytest.mark.parametrize("function", DECODING[1:], ids=lambda function: function.__name__)
def test_arguments_of_the_rings(function):
    of_ring = parameters(function)
    assert of_ring == {name: defaults(DecodeArguments)[name] for name in of_ring}
    assert set(defaults(DecodeArguments)) - set(of_ring) == {"mask", "algorithm", "root"}


def and_others(calls):
    """The calls, and those of mpiattn.torch and mpiattn.jax where there are torch and JAX."""
    every = [*calls]
    for library in ("torch", "jax"):
        with suppress(ImportError):
            every.append(import_module(f"mpiattn.{library}").attention)
    return every


def named(function):
    """The name of a function that is in several modules."""
    return f"{function.__module__}.{function.__qualname__}"


def check_names(function, record):
    """That a function has the arguments of a record, in its order and with its defaults."""
    of_call, of_record = parameters(function), defaults(record)
    assert {name: default for name, default in of_call.items() if name in of_record} == of_record
    assert [name for name in of_call if name in of_record] == [*of_record]


@pytest.mark.parametrize("function", and_others(CALLS_WITH_DOCUMENTS), ids=named)
def test_arguments_of_documents(function):
    check_names(function, DocumentArguments)
    kinds = signature(function).parameters
    assert {kinds[name].annotation for name in defaults(DocumentArguments) if name != "padding"} == {"PerDocument"}


@pytest.mark.parametrize("function", and_others(CALLS_WITH_BIASES), ids=named)
def test_arguments_of_biases(function):
    """With the types of the record, but that other libraries' functions take their arrays, and JAX's a traced seed."""
    check_names(function, BiasArguments)
    kinds = signature(function).parameters
    for name, annotation in BiasArguments.__annotations__.items():
        wanted = annotation.__forward_arg__
        if function not in CALLS_WITH_BIASES:
            of_jax = function.__module__ == "mpiattn.jax"
            wanted = wanted.replace("Array", "jax.Array" if of_jax else "torch.Tensor")
            wanted = "int | jax.Array | None" if of_jax and name == "seed" else wanted
        assert kinds[name].annotation == wanted, name


def test_attention_hands_on_the_arguments_of_calls():
    """And its docstring names them."""
    in_words = mpiattn.attention.__doc__
    for name in (*defaults(DocumentArguments), *defaults(BiasArguments), "sinks"):
        assert name in one_call.OF_CALL and name in in_words


def test_defaults_of_attention():
    """`attention` has the defaults of a plan, but for the layout, in which its arrays are."""
    of_plan = defaults(Problem, Options)
    same = {name: default for name, default in parameters(mpiattn.attention).items() if name in of_plan}
    assert len(same) > 3 and same.pop("layout") == "contiguous"
    assert same == {name: of_plan[name] for name in same}


@pytest.mark.parametrize("function", [PLAN, PLAN.forward, PLAN.backward, PLAN.verify, mpiattn.KVCache, *DECODING])
def test_docstrings_name_every_argument(function):
    """With what it is without it, where that is not said elsewhere."""
    in_words, of_function = documented(function), parameters(function)
    assert set(of_function) <= set(in_words)
    for name, default in of_function.items():
        head = in_words[name]
        if default is Parameter.empty or " : " not in head:  # as in another function
            continue
        assert "default" in head, head
        if isinstance(default, str | bool | int):
            said = '"1G"' if name == "max_message" else f'"{default}"' if isinstance(default, str) else repr(default)
            assert said in head, (name, head)
    assert byte_count("", "1G") == defaults(Options)["max_message"]


@pytest.mark.parametrize("command", ["run", "plan", "bench"])
def test_commands_have_the_same_defaults(command):
    parser = Parser()
    import_module(f"mpiattn.cli.{command}").add_arguments(parser)
    of_plan, compared = defaults(Problem, Options), set()
    for action in parser._actions:
        default = of_plan.get(action.dest, Parameter.empty)
        if default is not Parameter.empty:
            compared.add(action.dest)
            given = None if action.default == (None, None) else action.default
            assert given == default or (isinstance(given, list) and default in given), action.dest  # several: bench
    assert {"tile", "layout", "route", "machine", "causal", "window"} <= compared
