"""The benchmark harness, as far as the CPU can run it."""

import argparse
import json
import re
import subprocess
from importlib import metadata

import pytest
import torch
from cuops import _backend, errors
from cuops._bench import report
from cuops._bench import rms_norm as operator
from cuops._bench.case import Case, available, measure
from cuops._bench.timing import CpuTimer

from benchmarks import __main__ as benchmarks
from benchmarks import rms_norm as rms_norm_benchmark
from benchmarks import sample_normal_article as article

SMALL = ["--device", "cpu", "--quick", "--shapes", "5x64", "3x33", "--without", "torch.compile"]


def test_a_run_leaves_a_table_json_and_a_plot(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUOPS_COMMIT", "abc123")
    assert benchmarks.main(["rms_norm", *SMALL, "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "rms_norm.json").read_text())
    asked = {
        "commit": "abc123",
        "quick": True,
        "without": ["torch.compile"],
        "shapes": ["5x64", "3x33"],
        "dtypes": None,
    }
    assert asked.items() <= written["provenance"].items()
    assert written["provenance"]["versions"]["torch"] == metadata.version("torch")
    assert list(written["sections"]) == [
        name for name in rms_norm_benchmark.SECTIONS if name not in rms_norm_benchmark.ON_REQUEST
    ]
    for record in written["sections"]["backward"]:
        assert set(record["results"]) == {"cuops", "torch"}
        assert all(result["us"] > 0 for result in record["results"].values())
    assert (tmp_path / "rms_norm.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"bfloat16 5x64 +\d", capsys.readouterr().out)


@pytest.mark.parametrize(("section", "cases"), [("grid", 4), ("at_random", 6)])
def test_all_sizes_end_with_the_worst_ratio_to_the_best_peer(section, cases, tmp_path, capsys):
    assert benchmarks.main(["rms_norm", section, *SMALL, "--dtypes", "f", "--output", str(tmp_path)]) == 0
    ratios = [
        float(line.split("x")[0])
        for line in capsys.readouterr().out.split("best peer:\n")[1].splitlines()
        if "x torch:" in line
    ]
    assert ratios == sorted(ratios)
    assert len(ratios) == cases


def cases_of(printed):
    """How many cases the last lines are about."""
    return sum(map(int, re.findall(r"geometric mean of (\d+) cases", printed)))


def test_the_parts_of_the_grid_add_up(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUOPS_COMMIT", "abc123")
    grid = ["rms_norm", "grid", *SMALL, "--dtypes", "f", "--output", str(tmp_path)]
    assert benchmarks.main([*grid, "--part", "1/2"]) == 0
    assert cases_of(capsys.readouterr().out) == 2
    assert benchmarks.main([*grid, "--part", "2/2"]) == 0
    assert cases_of(capsys.readouterr().out) == 4
    parts = [json.loads((tmp_path / f"rms_norm_grid_{i}of2.json").read_text())["sections"]["grid"] for i in (1, 2)]
    assert len({(record["kind"], *record["shape"]) for part in parts for record in part}) == 4
    monkeypatch.setenv("CUOPS_COMMIT", "other")
    assert benchmarks.main([*grid, "--part", "2/2"]) == 0
    printed = capsys.readouterr().out
    assert "part 1 of 2, of the same commit and arguments, is not in" in printed
    assert cases_of(printed) == 2


def test_a_wrong_implementation_is_not_timed():
    functions = {"cuops": lambda x, weight: x, "torch": available("rms_norm", "cpu")["torch"]}
    record = measure(Case("rms_norm", "forward", (4, 48), torch.float32), functions, CpuTimer(quick=True), "cpu")
    assert record["results"]["cuops"]["failure"] == "wrong result"
    assert "to_best_peer" not in record
    assert "us" in record["results"]["torch"]
    assert "cuops fails: wrong result" in report.comparison([record])


@pytest.mark.parametrize(("of_roof", "is_doubted"), [(1.3, False), (17.7, True)])
def test_times_beyond_what_memory_allows_are_doubted(of_roof, is_doubted):
    record = {"dtype": "float32", "shape": (4, 48), "roof_us": 7.0}
    record["results"] = {"cuops": {"us": 7.0 / of_roof, "of_roof": of_roof}}
    assert ("not to be relied on" in report.comparison([record])) == is_doubted


@pytest.mark.parametrize(
    ("times", "medians"),
    [([9, 10, 30, 11, 8, 12], (9, 11)), ([1, 10], (1, 10)), ([9, 30, 3], (9, 30, 3))],
    ids=["close", "far apart", "three"],
)
def test_where_two_are_close_the_median_of_several_rounds_counts(times, medians):
    class Clock(CpuTimer):
        def kernel(self, make, calls=1):
            return left.pop(0)

    left, clock = list(times), Clock()
    clock.rounds = 3
    clock.copy = lambda traffic, calls=1: 0.5
    names = ("cuops", "slow", "torch") if len(medians) == 3 else ("cuops", "torch")
    functions = dict.fromkeys(names, available("rms_norm", "cpu")["torch"])
    record = measure(Case("rms_norm", "forward", (4, 48), torch.float32), functions, clock, "cpu")
    assert tuple(record["results"][name]["us"] for name in names) == medians
    assert (record["best_peer"], record["to_best_peer"]) == ("torch", medians[0] / medians[-1])
    assert not left


def test_a_failing_peer_leaves_the_others_measured():
    def fails(**_):
        raise RuntimeError("no such size")

    functions = {**available("rms_norm", "cpu", leave_out=["torch.compile"]), "Liger": fails}
    record = measure(Case("rms_norm", "forward", (4, 48), torch.float32), functions, CpuTimer(quick=True), "cpu")
    assert record["results"]["Liger"] == {"failure": "RuntimeError: no such size"}
    assert record["best_peer"] == "torch"
    assert record["to_best_peer"] > 0


@pytest.mark.parametrize("arguments", [["kron_linear", "grid"], ["rms_norm", "forward"]], ids=" ".join)
def test_parts_of_what_has_none_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        benchmarks.main([*arguments, "--device", "cpu", "--part", "1/2"])
    assert "has parts" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["0/2", "3/2", "2"])
def test_parts_that_are_none_are_refused(part, capsys):
    with pytest.raises(SystemExit):
        benchmarks.main(["rms_norm", "grid", "--device", "cpu", "--part", part])
    assert f"--part: expected a part such as 2/8, got {part}" in capsys.readouterr().err


def test_an_unknown_section_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmarks.main(["rms_norm", "sideways", "--device", "cpu"])
    assert stopped.value.code == 2
    assert "sideways" in capsys.readouterr().err


def test_sections_may_come_after_options(tmp_path):
    assert benchmarks.main(["rms_norm", *SMALL, "--output", str(tmp_path), "host", "--dtypes", "f"]) == 0
    assert list(json.loads((tmp_path / "rms_norm.json").read_text())["sections"]) == ["host"]


def test_the_comparison_of_the_article_ends_with_the_average_speed_up_and_both_plots(tmp_path, capsys):
    options = ["--quick", "--device", "cpu", "--without", "torch.compile", "--output", str(tmp_path)]
    assert benchmarks.main(["sample_normal", "article", *options]) == 0
    *_, last, _, _ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"average speed-up \(geometric mean\) of cuops, independent noise over .*, calls from Python: \d+\.\d\d", last
    )
    assert (tmp_path / "sample_normal_article.png").read_bytes().startswith(b"\x89PNG")
    records = json.loads((tmp_path / "sample_normal.json").read_text())["sections"]["article"]
    assert all(len(record["call_us"]) == len(record["kernel_us"]) == 4 for record in records)


def test_draws_stand_beside_fills_as_float32_and_of_their_dtype(tmp_path, capsys):
    options = ["--quick", "--device", "cpu", "--without", "torch.compile", "--output", str(tmp_path)]
    given = ["--dtypes", "b", "--shapes", "16x6"]
    assert benchmarks.main(["sample_normal", "shared", "alone", "small", *given, *options]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"fill as float32 +fill of that dtype", printed)) == 3
    assert len(re.findall(r"float32 16x6 +\d+\.\d\d( +\d+\.\d\d \d+\.\d\dx){2}", printed)) == 2
    sections = json.loads((tmp_path / "sample_normal.json").read_text())["sections"]
    assert {name: [record["dtype"] for record in records] for name, records in sections.items()} == {
        "shared": ["bfloat16"],
        "alone": ["float32"],
        "small": ["float32"],
    }
    assert all(records[0]["fill_of_dtype_us"] > 0 for records in sections.values())


def test_a_seed_on_the_device_stands_beside_one_on_the_host(tmp_path, capsys):
    options = ["--quick", "--device", "cpu", "--without", "torch.compile", "--output", str(tmp_path)]
    given = ["--dtypes", "b", "d", "--shapes", "16x6"]
    assert benchmarks.main(["sample_normal", "seed_on_device", *given, *options]) == 0
    assert len(re.findall(r"float(?:16|64) 16x6 +\d+\.\d\d +\d+\.\d\d", capsys.readouterr().out)) == 2
    records = json.loads((tmp_path / "sample_normal.json").read_text())["sections"]["seed_on_device"]
    assert [(r["dtype"], r["device_us"] > 0, r["host_us"] > 0) for r in records] == [
        ("bfloat16", True, True),
        ("float64", True, True),
    ]


def test_a_run_keeps_the_sections_that_it_does_not_measure(tmp_path, monkeypatch):
    monkeypatch.setenv("CUOPS_COMMIT", "abc123")
    quick = ["--quick", "--device", "cpu", "--without", "torch.compile", "--output", str(tmp_path)]

    def run(*sections):
        assert benchmarks.main(["sample_normal", *sections, *quick]) == 0
        return json.loads((tmp_path / "sample_normal.json").read_text())["sections"]

    earlier = run("samples", "host")
    assert [(record["samples"], record["dimension"]) for record in earlier["samples"]] == [(64, 110), (256, 110)]
    later = run("host")
    assert list(later) == ["samples", "host"]
    assert later["samples"] == earlier["samples"]
    assert later["host"] != earlier["host"]
    plots = [tmp_path / f"sample_normal{of}.png" for of in ("_samples", "")]
    assert "shared" in run("shared")
    assert [plot.exists() for plot in plots] == [True, True]
    monkeypatch.setenv("CUOPS_COMMIT", "other+")  # nor are those of uncommitted changes kept
    assert list(run("host")) == ["host"]
    assert [plot.exists() for plot in plots] == [False, False]
    assert list(run("shared")) == ["shared"]


def test_sections_on_request_leave_the_standard_file_alone(tmp_path, capsys):
    options = ["--shapes", "3x4", "--dtypes", "f", "--device", "cpu", "--quick", "--without", "torch.compile"]
    assert benchmarks.main(["kron_linear", "grid", "at_random", *options, "--output", str(tmp_path)]) == 0
    files = [tmp_path / f"kron_linear_{name}.json" for name in ("grid", "at_random")]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert capsys.readouterr().out.endswith(f"wrote {files[0]}, {files[1]}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("rms_norm --shapes 32768", "shape: expected at least two sizes"),
        ("rms_norm --shapes 0x5", "each at least 1, got [0, 5]"),
        ("rms_norm --shapes axb", "--shapes: expected sizes such as 16x32x32, got axb"),
        ("rms_norm --without abacus", "--without: expected one of cuops, torch,"),
        ("sample_normal --without cuops torch torch.compile", "--without: expected an implementation to be left"),
        ("kron_linear plan --without v3", "--without cuops: plan measures what cuops does"),
        ("rms_norm --dtypes f", "--output: expected another folder than benchmarks/results"),
        ("rms_norm --quick", "--output: expected another folder than benchmarks/results with --quick, --shapes,"),
        ("rms_norm", "--output: expected a folder, as what benchmarks/results has is of a GPU"),
        ("cem", "--output: expected a folder, as what benchmarks/results has is of a GPU"),
        ("cem --quick", "--output: expected another folder than benchmarks/results with --quick"),
        ("rms_norm --device cuda", "--device cuda: PyTorch sees no GPU"),
        ("cem --device cuda", "--device cuda: PyTorch sees no GPU"),
        ("rms_norm --output {file}", "file: expected a folder: File exists"),
        ("kron_linear plan --with v3", "unrecognized arguments: --with"),
        ("cem --quic", "unrecognized arguments: --quic"),
        ("rms_norm --output=", "--output: expected a path, got an empty one"),
        ("cem --output=", "--output: expected a path, got an empty one"),
        ("cem --output {file}", "file: expected a folder: File exists"),
    ],
)
def test_mistakes_are_a_line_before_anything_is_measured(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        benchmarks.main(arguments.format(file=tmp_path / "file").split())
    shown = capsys.readouterr()
    assert (stopped.value.code, shown.out) == (2, "")
    assert said in shown.err.splitlines()[-1]


def test_plans_where_there_is_no_gpu_are_a_line_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    def library():
        raise errors.DriverNotFoundError("there is no NVIDIA driver")

    monkeypatch.setattr(_backend, "library", library)
    options = ["--device", "cpu", "--output", str(tmp_path)]
    with pytest.raises(SystemExit) as stopped:
        benchmarks.main(["kron_linear", "plan", *options])
    assert stopped.value.code == 1
    assert capsys.readouterr().err.startswith("python -m benchmarks: there is no NVIDIA driver\n")
    assert not list(tmp_path.iterdir())


def test_rows_of_several_sizes_are_their_product(tmp_path):
    options = ["--device", "cpu", "--quick", "--dtypes", "f", "--without", "torch.compile", "--output", str(tmp_path)]
    assert benchmarks.main(["rms_norm", "forward", "--shapes", "4x5x6", *options]) == 0
    [record] = json.loads((tmp_path / "rms_norm.json").read_text())["sections"]["forward"]
    assert record["shape"] == [20, 6]


def test_a_commit_is_that_of_cuops(tmp_path, monkeypatch):
    monkeypatch.delenv("CUOPS_COMMIT", raising=False)
    monkeypatch.chdir(tmp_path)

    def git(*command):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *command], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "c")
    assert report._commit() is None
    files = [tmp_path / name for name in ("packages/cuops/a", "benchmarks/results/b")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    git("add", ".")
    git("commit", "-m", "c")
    files[1].write_text("figures")
    monkeypatch.chdir(files[1].parent)
    assert re.fullmatch("[0-9a-f]{40}", report._commit())
    files[0].write_text("source")
    assert re.fullmatch(r"[0-9a-f]{40}\+", report._commit())


@pytest.mark.parametrize(("operator", "roof"), [("rms_norm", "copy"), ("sample_normal", "fill")])
def test_a_plots_axis_names_the_roof(operator, roof, tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    labels = []
    monkeypatch.setattr(plt, "close", lambda figure: labels.extend(axis.get_xlabel() for axis in figure.axes))
    section = "forward" if operator == "rms_norm" else "independent"
    options = ["--device", "cpu", "--quick", "--shapes", "3x4", "--dtypes", "f", "--without", "torch.compile"]
    assert benchmarks.main([operator, section, *options, "--output", str(tmp_path)]) == 0
    assert [label.split(" of the same bytes")[0] for label in labels] == [f"time of a device {roof}"]


def test_json_has_no_infinity(tmp_path):
    report.write_json(tmp_path / "a.json", {"errors": [{"y": float("inf")}, (float("nan"), 1.5)]})
    assert "".join((tmp_path / "a.json").read_text().split()) == '{"errors":[{"y":null},[null,1.5]]}'


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'quack'", name="quack"), ""),
        (
            ModuleNotFoundError("No module named 'cutlass'", name="cutlass"),
            "ModuleNotFoundError: No module named 'cutlass'",
        ),
        (ImportError("cannot import name 'rmsnorm'", name="quack"), "ImportError: cannot import name 'rmsnorm'"),
        (OSError("libcuda.so"), "OSError: libcuda.so"),
    ],
    ids=repr,
)
def test_a_peer_that_is_installed_and_does_not_load_is_named(error, said, monkeypatch, capsys):
    def load():
        raise error

    monkeypatch.setattr(operator, "ON_CPU", ("cuops", "quack"))
    monkeypatch.setitem(operator.IMPLEMENTATIONS, "quack", load)
    assert list(available("rms_norm", "cpu")) == ["cuops"]
    assert capsys.readouterr().err == (f"quack does not load: {said}\n" if said else "")


def test_parts_of_the_article_add_up(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(article, "_measured", lambda shapes, *_: [times(n, d) for n, d in shapes])

    def times(n, d):
        names = {"cuops, independent": d, "torch, independent": 3 * d}
        return {"samples": n, "dimension": d, **dict.fromkeys(article.WAYS, names)}

    options = argparse.Namespace(device="cuda", quick=False, output=tmp_path, part=(2, 2), earlier={}, written=[])
    half = article.article(options, {}, CpuTimer())
    assert [record["dimension"] for record in half[:2]] == [110, 310]
    options.part, options.earlier = (1, 2), {"article": half}
    assert [record["dimension"] for record in article.article(options, {}, CpuTimer())] == list(range(10, 5000, 100))
    assert capsys.readouterr().out.endswith("calls from Python: 3.00\n")
