"""What `mpiattn run` says of a problem in OUT and in the report: the datasets, the chosen plan, the options."""

import hashlib

import numpy as np

from ..problem.documents import padding_of
from ..system.words import as_text
from ..version import __version__

PLAN = "tile", "schedule", "mesh-layout", "route", "wire-dtype", "backend", "transport"  # options


# Names in the attributes, and options, that do not change a bit of the results.
NOT_OF_RESULTS = {"machine", "predicted_seconds", "max_memory", "memory_cost", "transport"}
NOT_OF_RESULTS |= {"command", "run", "words", "input", "output", "problems", "resume", "json", "trace", "timeout"}
NOT_OF_RESULTS |= {"max_message"}


def results_of(p, backward):
    """Shape and dtype of every dataset of results."""
    shapes = {
        "out": ((p.batch, p.seqlen, p.heads, p.value_dim), p.dtype),
        "lse": ((p.batch, p.heads, p.seqlen), p.partial_dtype),
    }
    if backward:
        shapes |= {
            "dq": ((p.batch, p.seqlen, p.heads, p.head_dim), p.dtype),
            "dk": ((p.batch, p.seqlen_k, p.kv_heads, p.head_dim), p.dtype),
            "dv": ((p.batch, p.seqlen_k, p.kv_heads, p.value_dim), p.dtype),
        }
    return {name: shape for name, shape in shapes.items() if not (name == "dv" and p.shared_kv)}


def chosen_of(plan, args, axes, activity):
    """The chosen plan and the options given, for the attributes of OUT and the report; unset options are left out.

    padding, padding_k: tokens of the batch.
    """
    p = plan.problem
    asked = {
        "prefix": p.prefix or None,
        "causal_block": p.causal_block,
        "mask": None if p.mask is None else str(p.mask),
        "softcap": p.softcap,
        "documents": args.documents and as_text(args.documents),
        "transport": plan.transport or None,
        "documents_k": args.documents_k and as_text(args.documents_k),
    }
    if args.grid is not None:
        dims = [len(of_axis) for of_axis in plan.q_layout.sizes]
        asked |= {"grid": "x".join(map(str, args.grid)), "dims": "x".join(map(str, dims))}
    if args.padding:
        of_batch = padding_of(activity.documents, p.batch, p.seqlen, p.seqlen_k)
        asked |= dict(zip(("padding", "padding_k"), of_batch))
    if p.window != (None, None):
        asked["window"] = ",".join("" if side in (None, -1) else str(side) for side in args.window)
    if args.max_memory is not None:
        asked |= {"max_memory": args.max_memory, "memory_cost": plan.memory_cost}
    return {
        "axes": axes,
        "tile": str(plan.tile),
        "ranks": plan.tile.ranks,
        "machine": plan.machine.name,
        "predicted_seconds": plan.predicted_seconds,
        "layout": plan.q_layout.kind,
        "mesh_layout": plan.mesh_layout,
        "schedule": plan.schedule.name,
        "route": plan.route,
        "wire_dtype": p.wire_dtype,
        "backend": plan.backend,
        "causal": p.causal,
        "scale": p.scale,
        "backward": args.backward,
        **{name: value for name, value in asked.items() if value is not None},
    }


def made_by(tasks, args):
    """What the results of these tasks depend on besides IN, {name: text}; what differs between them is hashed."""
    values = {name: [str(value)] for name, value in vars(args).items() if name not in NOT_OF_RESULTS}
    for name in {name for task in tasks for name in task.chosen} - NOT_OF_RESULTS:
        values[name] = [str(task.chosen.get(name)) for task in tasks]
    values["mask"] = [str(args.mask)]  # a mask as text may be shortened
    of_all = {name: each[0] if len(set(each)) == 1 else _hash(each) for name, each in sorted(values.items())}
    shapes = [(task.group, task.source.shapes) for task in tasks]
    documents = [{name: np.asarray(cuts).tolist() for name, cuts in task.documents.items()} for task in tasks]
    ranks = of_all.pop("ranks")
    return {
        "mpiattn": __version__,
        "problems": f"{len(tasks)} ({_hash(shapes)})",
        "ranks": ranks,
        **of_all,
        "content of --documents": _hash(documents),
    }


def _hash(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
