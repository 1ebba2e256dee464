"""What run_all.py hands over: summary.json, summary.txt and results.tar.gz, written anew after every section."""

import hashlib
import json
import platform
import subprocess
import sys
import tarfile
import time
from importlib import metadata

QUERY = ("name", "driver_version", "memory.total", "compute_cap", "clocks.max.sm", "power.limit")
PACKAGES = ("numpy", "mpi", "openmpi", "h5py", "cupy", "cuda", "nvidia", "torch", "ml", "pytest", "triton")


def gpu_facts():
    """What nvidia-smi says of the first GPU, by name; empty where there is none."""
    for program in ("nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi"):
        try:
            done = subprocess.run(
                [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"],
                text=True,
                capture_output=True,
                timeout=60,
                check=True,
            )
            return dict(zip(QUERY, (field.strip() for field in done.stdout.splitlines()[0].split(","))))
        except (OSError, subprocess.SubprocessError, IndexError):
            continue
    return {}


def versions(folders):
    """Versions of the packages that matter, as a Python sees them that looks into `folders` first."""
    versions_by_name = {}
    for of in metadata.distributions(path=[*map(str, folders), *sys.path]):
        name = (of.metadata["Name"] or "").lower()
        if name.startswith(PACKAGES):
            versions_by_name.setdefault(name, of.version)
    return dict(sorted(versions_by_name.items()))


def source_digest(root):
    """A name for the sources that are measured."""
    digest = hashlib.sha256()
    for folder in ("mpiattn", "kernels", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


class Results:
    """Results in a folder that outlasts a command, and in OUT, whatever OUT has lost in between.

    folder: of the logs and the tables of one state of the sources.  facts: what is known of the machine.
    """

    def __init__(self, folder, out, facts):
        self.folder, self.out, self.facts = folder, out, facts
        folder.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        self.path = folder / "sections.json"
        self.sections = json.loads(self.path.read_text()) if self.path.is_file() else {}

    def add(self, name, result):
        """Note a section, and write everything."""
        self.sections.pop(name, None)
        self.sections[name] = result
        self._write(self.path, json.dumps(self.sections))
        self._write(self.out / "summary.json", json.dumps({**self.facts, "sections": self.sections}, indent=1))
        self._write(self.out / "summary.txt", self.as_text())
        partial = self.out / "results.partial"
        with tarfile.open(partial, "w:gz") as packed:
            packed.add(self.out / "summary.json", "results/summary.json")
            packed.add(self.out / "summary.txt", "results/summary.txt")
            for path in sorted(self.folder.iterdir()):
                packed.add(path, f"results/{path.name}")
        partial.replace(self.out / "results.tar.gz")

    @staticmethod
    def _write(path, text):
        partial = path.with_suffix(".partial")
        partial.write_text(text + "\n")
        partial.replace(path)

    def as_text(self):
        """The machine, a line for every section, and the figures."""
        gpu = self.facts["gpu"]
        lines = [
            f"{self.facts['date']}  {gpu.get('name', 'no GPU that nvidia-smi knows')}, "
            f"driver {gpu.get('driver_version', 'none')}, {self.facts['system']}",
            f"sources {self.facts['source']}; "
            + ", ".join(f"{name} {version}" for name, version in self.facts["versions"].items()),
            "",
        ]
        width = max(map(len, self.sections), default=0)
        lines += [
            f"{name.ljust(width)}  {result['status']:7} {result['seconds']:6.1f} s of {result['estimate']:3.0f}  "
            f"{'; '.join(filter(None, (result['why'], result['record'].get('result'))))}".rstrip()
            for name, result in self.sections.items()
        ]
        figures = self.figures()
        return "\n".join([*lines, "", *figures] if figures else lines)

    def figures(self):
        """A line for everything that was measured; what several sections have measured stands once."""
        lines = {}
        for result in self.sections.values():
            for table in result["record"].get("tables", ()):
                line = figure(table, result["record"]["problem"])
                lines.setdefault(line.split(":")[0], line)
        return list(lines.values())


def figure(table, problem):
    """A table of `mpiattn bench --kernel` in a line."""
    rows, heads = table["results"], f"{problem['heads']} heads over {problem['kv_heads']}"
    form = f"{problem['dtype']} d{problem['head_dim']}"
    own = rows[0]
    if table["what"] in ("forward", "backward"):
        mask = "causal" if problem["causal"] else "full"
        cells = [
            f"{row['name']} {row['flops_per_second'] / 1e12:.4g}"
            + (f" (mpiattn is {own['flops_per_second'] / row['flops_per_second']:.2f} of it)" if row is not own else "")
            for row in rows
        ]
        cells += [f"{name} is missing ({why[:60]})" for name, why in table["missing"].items()]
        return f"{table['what']} {form}, {heads}, {table['seqlen']} {mask}: TFLOP/s: {'; '.join(cells)}"
    if table["what"] == "decode":
        copy = rows[-1]
        cells = [
            f"{row['name']} {row['bytes_per_second'] / 1e9:.4g} GB/s, "
            f"{row['bytes_per_second'] / copy['bytes_per_second']:.0%} of {copy['name']}"
            for row in rows[:-1]
        ]
        return (
            f"decode {form}, {table['keys']} keys, {table['heads']} heads over {table['kv_heads']}: "
            f"{'; '.join(cells)}; {copy['name']} {copy['bytes_per_second'] / 1e9:.4g} GB/s"
        )
    if table["what"] == "carry":
        return (
            f"carry {form}, {heads}, {table['seqlen']} queries by {table['keys']} keys: "
            f"adding to a partial costs {table['overhead']:+.1%}"
        )
    return f"launch {form}: " + "; ".join(f"{row['name']} {row['median'] * 1e6:.3g} us" for row in rows)


def facts(root, folders):
    """What is known of the machine and of the sources."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "gpu": gpu_facts(),
        "system": platform.platform(),
        "source": source_digest(root),
        "versions": {"python": platform.python_version(), **versions(folders)},
    }
