"""How run_all.py runs a section: commands with a log and a time limit, and a summary of all; standard library only."""

import json
import os
import platform
import signal
import subprocess
import time

QUERY = ("name", "driver_version", "memory.total", "compute_cap", "clocks.max.sm", "power.limit")
VERSIONS = """
import importlib.metadata as m, json, sys
print(json.dumps({"python": sys.version.split()[0], **{d.metadata["Name"]: d.version for d in m.distributions()
      if d.metadata["Name"].lower().startswith(("numpy", "mpi", "openmpi", "h5py", "cupy", "cuda", "nvidia", "torch",
                                                "ml", "pytest"))}}))
"""
STARTED = time.monotonic()


class Skip(Exception):
    """Why a section cannot be done here."""


def gpu_facts():
    """What nvidia-smi says of the first GPU, by name; empty where there is none."""
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"], text=True,
                              capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(QUERY, (field.strip() for field in done.stdout.splitlines()[0].split(","))))


def command(log, words, seconds, environment):
    """Run a command; its output, which goes to a log too.  RuntimeError if it fails or takes longer than `seconds`."""
    words = list(map(str, words))
    log.write(f"$ {' '.join(words)}\n")
    log.flush()
    if seconds <= 0:
        raise RuntimeError("no time is left")
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env=environment, start_new_session=True)
    late = False
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        process.terminate()                    # a launcher ends its ranks, which are in process groups of their own
        try:
            text, _ = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            try:
                text, _ = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                text = b"(a process that was left holds the output)"
    text = text.decode(errors="replace")
    log.write(text)
    if late:
        raise RuntimeError(f"no end after {seconds:.0f} s")
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {' | '.join(text.strip().splitlines()[-3:])[:400]}")
    return text


def run_section(name, sections, limit):
    """A section's status, "passed", "failed" or "skipped", why, what it took, and what it has found."""
    start, found, why = time.monotonic(), {}, ""
    path = sections.out / f"{name}.log"
    with path.open("w") as log:
        def run(words, seconds, **environment):
            left = limit - (time.monotonic() - STARTED)
            return command(log, words, min(seconds, left), sections.environment(**environment))
        try:
            found, status = sections.section(name, run) or {}, "passed"
        except Skip as skip:
            status, why = "skipped", str(skip)
        except Exception as error:             # of whatever kind: the other sections go on
            status, why = "failed", f"{type(error).__name__}: {error}"
            log.write(f"{why}\n")
    return {"status": status, "why": why, "seconds": round(time.monotonic() - start, 1), "log": path.name,
            "found": found}


def _versions(python):
    try:
        done = subprocess.run([python, "-c", VERSIONS], text=True, capture_output=True, timeout=60, check=True)
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"unknown": str(error)[:200]}


def write_summary(out, python, results):
    """summary.json and summary.txt, of what has been run so far."""
    data = {"date": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "gpu": gpu_facts(), "system": platform.platform(),
            "versions": _versions(python), "sections": results}
    lines = [f"{data['date']}  {data['gpu'].get('name', 'no GPU')}, driver "
             f"{data['gpu'].get('driver_version', 'none')}, {data['system']}",
             ", ".join(f"{name} {version}" for name, version in data["versions"].items()), ""]
    width = max(map(len, results))
    lines += [f"{name.ljust(width)}  {result['status']:7}  {result['seconds']:6.1f} s  "
              f"{result['why'] or result['found'].get('result', '')}".rstrip() for name, result in results.items()]
    for name, result in results.items():
        table = out / f"{name}.txt"
        if result["status"] == "passed" and table.is_file():
            lines += ["", f"== {name}", table.read_text().rstrip()]
    for path, text in ((out / "summary.json", json.dumps(data, indent=1)), (out / "summary.txt", "\n".join(lines))):
        partial = path.with_suffix(".partial")
        partial.write_text(text + "\n")
        partial.replace(path)
