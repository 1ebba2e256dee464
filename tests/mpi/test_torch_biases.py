"""Biases and dropout in mpiattn.torch: gradients beside dense PyTorch, results beside its flex attention."""

import biased
import numpy as np
import pytest
from mpi4py import MPI
from runs import agreed, tiles
from test_agreement import same_error
from test_biases import of_rank

from mpiattn import MeshAttention
from mpiattn.errors import ArgumentError, VerificationError

if MPI.COMM_WORLD.size > 8:
    pytest.skip("many ranks would take long to load torch", allow_module_level=True)
torch = pytest.importorskip("torch", reason="torch is not installed (the torch extra has it)")

from mpiattn.torch import attention  # noqa: E402  (needs torch)

torch.set_num_threads(1)

TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 6e-2}  # of the largest value
SHAPE = {"batch": 2, "seqlen": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6}
EVERY = "bias key_bias alibi relative"
NAMES = "bias", "key_bias", "alibi_slopes", "relative_bias"


def drawn_tensors(plan, drawn):
    """Whole q, k, v, dout, dlse and the biases in float64, of values that the plan's dtypes have."""
    p, numbers = plan.problem, torch.Generator().manual_seed(7)
    shapes = {
        "q": (p.batch, p.seqlen, p.heads, p.head_dim),
        "k": (p.batch, p.seqlen_k, p.kv_heads, p.head_dim),
        "v": (p.batch, p.seqlen_k, p.kv_heads, p.value_dim),
        "dout": (p.batch, p.seqlen, p.heads, p.value_dim),
        "dlse": (p.batch, p.heads, p.seqlen),
    }
    narrow = getattr(torch, p.dtype)
    whole = {name: torch.randn(shape, generator=numbers).to(narrow).double() for name, shape in shapes.items()}
    return whole | {name: tensor(getattr(drawn, name)).double() for name in drawn.given}


def tensor(array):
    """Of bfloat16 too, which torch does not take from NumPy."""
    return torch.from_numpy(array.astype(np.float32)).bfloat16() if array.dtype == "bfloat16" else torch.tensor(array)


def summed(whole, drawn, seqlen):
    """The biases as one (batch or 1, heads or 1, queries, keys), by torch alone, of as many queries as keys."""
    far = torch.arange(seqlen) - torch.arange(seqlen)[:, None]
    terms = []
    if "bias" in whole:
        terms.append(whole["bias"])
    if "key_bias" in whole:
        terms.append(whole["key_bias"][..., None, :])
    if "alibi_slopes" in whole:
        terms.append(-whole["alibi_slopes"][:, None, None] * far.abs())
    if "relative_bias" in whole:
        table = whole["relative_bias"]
        if drawn.relative_grid is None:
            reach = table.shape[1] // 2
            terms.append(table[:, far.clamp(-reach, reach) + reach])
        else:
            index = []
            places = torch.cartesian_prod(*map(torch.arange, drawn.relative_grid))
            for axis, points in enumerate(drawn.relative_grid):
                offset, reach = places[None, :, axis] - places[:, None, axis], table.shape[1 + axis] // 2
                if drawn.relative_cyclic and drawn.relative_cyclic[axis]:
                    offset = (offset + points // 2) % points - points // 2
                index.append(offset.clamp(-reach, reach) + reach)
            terms.append(table[:, index[0], index[1]])
    return sum(terms).reshape(-1, *torch.broadcast_shapes(*(term.shape for term in terms))[-3:])


def dense(p, whole, drawn):
    """(out, lse) of the whole problem, by torch."""
    q, k, v = (whole[name].transpose(1, 2) for name in "qkv")
    k, v = (x.repeat_interleave(p.heads // p.kv_heads, 1) for x in (k, v))
    added = summed(whole, drawn, p.seqlen)
    score = q @ k.transpose(2, 3) * p.scale
    score = (p.softcap * torch.tanh(score / p.softcap) if p.softcap else score) + added
    if p.causal:
        score = score.masked_fill(torch.ones(p.seqlen, p.seqlen).triu(1).bool(), -torch.inf)
    if p.softcap or p.causal or drawn.dropout:
        out = score.softmax(-1) * torch.from_numpy(biased.kept(p, drawn)) @ v
    else:  # which has neither
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=added.expand(p.batch, p.heads, -1, -1), scale=p.scale
        )
    return out.transpose(1, 2), score.logsumexp(-1)


def own(plan, whole, drawn):
    """This rank's chunks of the whole in the plan's dtypes, and its biases in those that were drawn, as leaves."""
    p, wide = plan.problem, getattr(torch, plan.problem.partial_dtype)
    chunks = {name: whole[name][:, plan.positions].to(getattr(torch, p.dtype)) for name in ("q", "dout")}
    chunks |= {name: whole[name][:, plan.positions_k].to(chunks["q"].dtype) for name in "kv"}
    chunks["dlse"] = whole["dlse"][..., plan.positions].to(wide)
    some = of_rank(plan, drawn)
    biases = {name: tensor(some.pop(name)).requires_grad_() for name in drawn.given}
    for name in "qkv":
        chunks[name].requires_grad_()
    return chunks, biases, some


def placed(plan, name, part, whole):
    """This rank's part of a gradient in zeros of the shape of the whole; the sum over ranks is the whole gradient."""
    if name in ("alibi_slopes", "relative_bias"):
        return part.double().numpy()
    zeros = torch.zeros_like(whole)
    if name == "bias":
        rows, columns = (torch.from_numpy(at) for at in plan.bias_positions)
        some = zeros[plan.bias_sequences if len(whole) > 1 else slice(None)]
        some = some[:, plan.bias_heads if whole.shape[1] > 1 else slice(None)]
        some[:, :, rows[:, None], columns] = part.double()
    elif name == "key_bias":
        zeros[..., plan.positions_k] = part.double()
    else:
        zeros[:, plan.positions if name == "q" else plan.positions_k] = part.double()
    return zeros.numpy()


def shared_of(drawn):
    lengths = () if drawn.bias is None else zip(("batch", "heads"), drawn.bias.shape)
    return [name for name, length in lengths if length == 1] if drawn.bias is not None else None


CASES = {
    "bias": ("bias", {}),
    "bfloat16": ("bias key_bias", {"dtype": "bfloat16"}),
    "softcap": (EVERY, {"softcap": 2.0, "dtype": "float64"}),
    "grid": ("grid alibi", {}),
    "dropout": (f"{EVERY} dropout", {"causal": True}),
    "planes": (f"{EVERY} dropout", {"tile": "planes", "dtype": "float64"}),
    "pieces": ("key_bias alibi relative dropout", {"tile": "bands", "causal": True}),
}


@pytest.mark.parametrize("case, seed", [*((case, 0) for case in CASES), ("bias", 1), ("planes", 1)])
def test_gradients_are_those_of_dense_torch(comm, case, seed):
    kinds, options = CASES[case]
    options = SHAPE | {"tile": tiles(comm.size)[len(tiles(comm.size)) // 2]} | options
    if options["tile"] == "planes":
        options |= {"tile": f"{comm.size}x1x1", "heads": 2 * comm.size, "kv_heads": comm.size}
    with MeshAttention(comm, **options, layout="zigzag", key_bias="key_bias" in kinds) as plan:
        p = plan.problem
        drawn = biased.draw(p, 10 * len(kinds) + seed, kinds, narrow=True)
        if case == "planes" and comm.size > 1 and seed:  # one tile for all planes
            drawn = drawn._replace(bias=np.ascontiguousarray(drawn.bias[:1, :1]))
        whole = drawn_tensors(plan, drawn)
        chunks, biases, some = own(plan, whole, drawn)
        wide = chunks["dlse"].dtype
        out, lse = attention(
            plan, chunks["q"], chunks["k"], chunks["v"], **biases, **some, bias_shared=shared_of(drawn)
        )
        ((out.to(wide) * chunks["dout"].to(wide)).sum() + (lse * chunks["dlse"]).sum()).backward()
        leaves = {name: x.requires_grad_() for name, x in whole.items() if name not in ("dout", "dlse")}
        right, right_lse = dense(p, whole, drawn)
        ((right * whole["dout"]).sum() + (right_lse * whole["dlse"]).sum()).backward()
        complaints = {}
        pairs = {"out": (out, right[:, plan.positions]), "lse": (lse, right_lse[..., plan.positions])}
        pairs = {name: [x.detach().double().numpy() for x in pair] for name, pair in pairs.items()}
        for name, leaf in leaves.items():
            part = (chunks | biases)[name]
            assert part.grad.dtype == part.dtype
            pairs[name] = comm.allreduce(placed(plan, name, part.grad, whole[name].detach())), leaf.grad.numpy()
    for name, (got, ref) in pairs.items():
        off = np.abs(got - ref).max() / max(np.abs(ref).max(), 1) * (1 - drawn.dropout)
        if not off < TOLERANCE[p.dtype]:
            complaints[name] = off
    agreed(comm, complaints and str(complaints))


@pytest.mark.filterwarnings("ignore")  # torch would rather compile
def test_flex_attention_agrees(comm):
    """Scale, then softcap, then biases, as PyTorch's users write it in a score_mod."""
    from torch.nn.attention.flex_attention import flex_attention

    with MeshAttention(comm, **SHAPE, tile="mesh", softcap=1.5, scale=0.7, key_bias=True) as plan:
        drawn = biased.draw(plan.problem, 3, EVERY)
        whole = drawn_tensors(plan, drawn)
        chunks, biases, _ = own(plan, whole, drawn)
        with torch.no_grad():
            out, lse = attention(plan, chunks["q"], chunks["k"], chunks["v"], **biases)
        if comm.rank:  # torch loads its compiler for such a function, which takes long
            comm.gather((plan.positions, out, lse))
            return
        gathered = comm.gather((plan.positions, out, lse))
    bias, slopes, table, of_keys = (whole[name] for name in ("bias", "alibi_slopes", "relative_bias", "key_bias"))
    bias, table, of_keys = bias.expand(2, 4, -1, -1), table.expand(4, -1), of_keys.expand(2, 4, -1)
    reach = table.shape[1] // 2

    def score_mod(score, b, h, i, j):
        score = 1.5 * torch.tanh(score / 1.5)
        score = score + bias[b, h, i, j] + of_keys[b, h, j] - slopes[h] * (j - i).abs()
        return score + table[h, (j - i).clamp(-reach, reach) + reach]

    q, k, v = (whole[name].transpose(1, 2) for name in "qkv")
    right, right_lse = flex_attention(q, k, v, score_mod=score_mod, scale=0.7, enable_gqa=True, return_lse=True)
    for at, out, lse in gathered:
        assert (out - right.transpose(1, 2)[:, at]).abs().max() < 1e-5
        assert (lse - right_lse[..., at]).abs().max() < 1e-5


def made(plan, kinds="bias alibi"):
    drawn = biased.draw(plan.problem, 5, kinds)
    drawn = drawn._replace(bias=np.nan_to_num(drawn.bias, neginf=0))
    return own(plan, drawn_tensors(plan, drawn), drawn)


@pytest.fixture
def plan(comm):
    with MeshAttention(comm, **SHAPE, tile=tiles(comm.size)[0]) as plan:
        yield plan


def test_only_gradients_that_are_required(plan, monkeypatch):
    """Those of the forward pass, whoever is asked for in the backward pass."""
    chunks, biases, _ = made(plan)
    backward, seen = plan.backward, []
    monkeypatch.setattr(plan, "backward", lambda *a, **how: seen.append(backward(*a, **how)) or seen[-1])
    biases["bias"].requires_grad_(False)
    qkv = [chunks[name] for name in "qkv"]
    attention(plan, *qkv, **biases, bias_shared=[])[0].sum().backward()
    assert len(seen[0]) == 4 and seen[0][3].shape == (4,)
    assert biases["bias"].grad is None and biases["alibi_slopes"].grad.any()
    for bias in biases.values():
        bias.requires_grad_(False)
    attention(plan, *qkv, **biases)[0].sum().backward()
    assert len(seen[1]) == 3
    biases["bias"].requires_grad_()
    out, _ = attention(plan, *(x.detach() for x in qkv), **biases)
    (grad,) = torch.autograd.grad(out.sum(), biases["bias"])
    assert len(seen[2]) == 4 and torch.equal(grad, seen[2][3])
    with torch.no_grad():
        assert not attention(plan, *qkv, **biases, bias_shared=[])[0].requires_grad


def test_dropout_of_the_backward_pass(plan):
    """It does not depend on a list that the caller changes in between, nor on recomputation."""
    chunks, biases, _ = made(plan)
    grid, dropped = [4, 6], {"dropout": 0.4, "seed": 3}
    table = torch.randn(1, 3, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def layer(q, k, v, bias):
        return attention(
            plan, q, k, v, bias=bias, relative_bias=table, relative_grid=grid, relative_cyclic=[True, False], **dropped
        )[0]

    leaves = [*(chunks[name] for name in "qkv"), biases["bias"]]
    expected = torch.autograd.grad(layer(*leaves), [*leaves, table], chunks["dout"])
    out = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False)
    again = torch.autograd.grad(out, [*leaves, table], chunks["dout"])
    assert all(torch.equal(a, b) for a, b in zip(expected, again))
    out = layer(*leaves)
    grid[:], dropped["seed"] = [24, 1], 4
    assert all(torch.equal(a, b) for a, b in zip(expected, torch.autograd.grad(out, [*leaves, table], chunks["dout"])))


def test_wrong_on_one_rank(comm, plan):
    chunks, biases, _ = made(plan)
    last, given = comm.rank == comm.size - 1, [chunks[name] for name in "qkv"]
    for name, change, says in [
        ("bias", lambda x: x.detach().numpy(), "bias is a ndarray; it must be a torch tensor"),
        ("bias", lambda x: x.to("meta"), "bias is on device meta"),
        ("bias", lambda x: x[..., 1:], "bias has shape"),
        ("alibi_slopes", lambda x: x.double(), "alibi_slopes has dtype float64; it must be float32"),
        ("alibi_slopes", lambda x: x.to("meta"), "alibi_slopes is on device meta"),
    ]:
        wrong = biases | ({name: change(biases[name])} if last else {})
        assert says in same_error(comm, lambda wrong=wrong: attention(plan, *given, **wrong))
    with pytest.raises(ArgumentError, match="bias_shared is given without bias, which alone"):
        attention(plan, *given, bias_shared=["heads"])
    if comm.size > 1:
        biases["bias"].requires_grad_(last)
        assert "requires_grad (of biases)" in same_error(comm, lambda: attention(plan, *given, **biases))
        assert "alibi_slopes" in same_error(comm, lambda: attention(plan, *given, **({} if last else biases)))


@pytest.mark.parametrize("wrong", ["nothing", "dbias"])
def test_verified(comm, monkeypatch, wrong):
    """Biases, dropout and those gradients that were required are compared too."""
    backward, guilty = MeshAttention.backward, comm.size - 1

    def spoilt(self, *arrays, **options):
        results = backward(self, *arrays, **options)
        if wrong == "dbias" and comm.rank == guilty:
            results[3][..., 0] += 1
        return results

    monkeypatch.setattr(MeshAttention, "backward", spoilt)
    with MeshAttention(comm, **SHAPE, tile=tiles(comm.size)[0]) as plan:
        chunks, biases, _ = made(plan)
        biases["alibi_slopes"].requires_grad_(False)
        qkv, dropout = [chunks[name] for name in "qkv"], {"dropout": 0.3, "seed": 5}
        loss = attention(plan, *qkv, **biases, **dropout, verify=True, bias_shared=[])[0].square().sum()
        if wrong == "nothing":
            return loss.backward()
        assert "dbias off by" in same_error(comm, loss.backward, VerificationError)
