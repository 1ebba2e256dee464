"""`mpiattn bench --kernel` on tiny sizes: that it checks, measures and says what it measured."""

import importlib.util
import json
import sys

import pytest
from launch import TESTS, mpirun

from mpiattn.backends.testing import emulated

KERNEL = [
    sys.executable,
    *"-m mpiattn bench --kernel --seqlen 70 --heads 2 --head-dim 16 --runs 2 --decode-keys 150 --carry-keys 33".split(),
]
TORCH = importlib.util.find_spec("torch") is not None


def bench(*options, **how):
    return mpirun(1, [*KERNEL, *options], **how)


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "backend, dtype",
    [("numpy", "bfloat16"), ("deferred", "float32"), pytest.param("emulated", "bfloat16", marks=pytest.mark.slow)],
)
def test_sections(tmp_path, backend, dtype):
    if backend == "emulated" and emulated.compiler() is None:
        pytest.skip("the emulation needs a C++ compiler")
    path = tmp_path / "k.json"
    text = bench(
        "--seqlen",
        "70",
        "33",
        "--backend",
        backend,
        "--dtype",
        dtype,
        *"--causal --direction both --kv-heads 1 --json".split(),
        path,
        timeout=120,
    ).stdout
    data = json.loads(path.read_text())
    sections = data["sections"]
    assert [section["what"] for section in sections] == ["forward", "backward"] * 2 + ["decode"] * 2 + [
        "carry",
        "launch",
    ]
    for section in sections:
        names = [row["name"] for row in section["results"]]
        assert all(len(row["seconds"]) == 2 and row["median"] > 0 for row in section["results"])
        if section["what"] in ("forward", "backward", "decode"):
            assert ("torch" in names) == TORCH and names[0] == "mpiattn"
            limit = "C's memchr" if section["what"] == "decode" else "float32 product"
            assert sum(name.startswith(limit) for name in names) == 1 and not section["missing"]
            assert all(row["difference"] < 3e-2 for row in section["results"] if not row["name"].startswith(limit))
    pairs = 70 * 71 // 2 * 2
    assert [section["flops"] for section in sections[:2]] == [2 * 32 * pairs, 5 * 32 * pairs]
    row = sections[0]["results"][0]
    assert row["flops_per_second"] == pytest.approx(sections[0]["flops"] / row["median"])
    product = sections[0]["results"][-1]
    assert product["flops_per_second"] == pytest.approx(2 * 1536**3 / product["median"])
    assert f"{product['flops_per_second'] / row['flops_per_second']:.3g}" in text
    for section, heads in zip(sections[4:6], (2, 8)):
        assert section["bytes"] == 2 * 150 * 16 * (2 if dtype == "bfloat16" else 4) and section["heads"] == heads
    assert "C's memchr" in text and "onto a partial" in text and ("for tests" in text) == (backend != "numpy")


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    "broken, complaint",
    [("attend", "against float64"), ("attend_backward", "against float64"), ("attend_pages", "over 150 keys")],
)
def test_a_wrong_result_is_not_measured(broken, complaint):
    code = (
        f"import sys; from mpiattn import backends; B = type(backends.get()); right = B.{broken}\n"
        "def wrong(self, block, *rest, **more):\n"
        "    right(self, block._replace(q=block.q * 1.1), *rest, **more)\n"
        f"B.{broken} = wrong\n"
        "from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    outcome = mpirun(1, [sys.executable, "-c", code, *KERNEL[3:], "--direction", "both"], check=False)
    assert outcome.returncode == 1 and not outcome.stdout
    assert outcome.stderr.count(complaint) == 1 and "nothing is measured" in outcome.stderr


@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "ranks, options, message",
    [
        (2, [], "this launch has 2"),
        (1, ["--tile", "1x1"], "--tile is ['1x1']; it has no meaning with --kernel"),
        (1, ["--decode-keys", "-1"], "--decode-keys is -1"),
        (1, ["--kv-heads", "3"], "--kv-heads is 3"),
        (1, ["--json", "/nowhere/k.json"], "--json is '/nowhere/k.json'"),
    ],
)
def test_errors(ranks, options, message):
    outcome = mpirun(ranks, [*KERNEL, *options], check=False)
    assert outcome.returncode and outcome.stderr.count(message) == 1 and "Traceback" not in outcome.stderr


def test_options_of_kernels_without_it():
    outcome = mpirun(2, [*KERNEL[:4], "--carry-keys", "33"], check=False)
    assert outcome.returncode and outcome.stderr.count("it has no meaning without --kernel") == 1


MADE_UP = """import sys; sys.path.insert(0, sys.argv.pop(1))
import fake_cupy
fake_cupy.cuda.get_elapsed_time = lambda start, stop: 4.0
fake_cupy.runtime.memcpyDeviceToDevice = 3
fake_cupy.runtime.runtimeGetVersion = fake_cupy.runtime.driverGetVersion = lambda: 13000
sys.modules["cupy"] = fake_cupy
from mpiattn.cli import main; sys.exit(main(sys.argv[1:]))"""


@pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler")
def test_events_are_the_clock_of_a_gpu():
    """On a made-up one, every two events are 4 ms apart: that is one launch after a preparation, or several."""
    outcome = mpirun(1, [sys.executable, "-c", MADE_UP, TESTS, *KERNEL[3:], "--backend", "cuda", "--json", "-"])
    data = json.loads(outcome.stdout)
    medians = {section["what"]: section["results"][0]["median"] for section in data["sections"]}
    assert data["backend"] == "cuda" and "driver's CUDA 13000" in data["environment"]["device"]
    assert medians["forward"] == pytest.approx(4e-3) and medians["decode"] == pytest.approx(4e-3 / 3)
    assert data["sections"][1]["results"][-1]["name"] == "a copy"
