"""What a user installs: one top-level package, and commands that a user's own folders cannot take over."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("training", "eval", "export", "leaderboards")


def run(*argv, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, argv)], capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    tracked = run("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", check=True).stdout.split("\n")
    for name in filter(None, tracked):  # a copy, so that building leaves nothing in the checkout
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = run(sys.executable, *command, "-w", folder, folder / "source")
    assert done.returncode == 0, done.stderr
    [made] = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """An environment that holds the wheel and nothing of the checkout; other packages come from this one."""
    folder = tmp_path_factory.mktemp("env")
    run(sys.executable, "-m", "venv", "--without-pip", folder, check=True)
    [site] = folder.glob("lib/python3*/site-packages")
    # a path in a .pth file gives the packages there, and not the .pth files there (one of which is the checkout)
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = ["-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-deps", "--no-index"]
    done = run(sys.executable, *command, "--ignore-installed", wheel)
    assert done.returncode == 0, done.stderr
    return folder


def test_only_zaya_at_the_top_level(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"zaya"}


def test_every_file_of_the_rooms_is_in_the_wheel(wheel):
    """The list of packages in pyproject.toml holds every folder with something to install."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    inside = set(zipfile.ZipFile(wheel).namelist())
    kinds = (".py", ".yaml", ".json", ".html", ".css", ".js", ".csv")
    for room in ("zaya", *ROOMS):
        for file in (ROOT / room).rglob("*"):
            if file.suffix in kinds and "__pycache__" not in file.parts:
                name = file.relative_to(ROOT).as_posix()
                assert (name if room == "zaya" else f"zaya/{name}") in inside
    assert len(packages) == len(set(packages))


@pytest.mark.parametrize("on_path", [False, True])
def test_the_folders_of_a_user_are_left_alone(installed, tmp_path, on_path):
    for name in ROOMS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('ran the user\\'s own {name}')")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | (
        {"PYTHONPATH": str(tmp_path)} if on_path else {}
    )
    for command in (["train"], ["eval"], ["export"], ["board", "build"], ["data", "tokenize"], ["serve"]):
        for start in ([installed / "bin" / "zaya"], [installed / "bin" / "python", "-m", "zaya.cli"]):
            done = run(*start, *command, "--help", cwd=tmp_path, env=env)
            assert (done.returncode, done.stderr) == (0, "")
            assert "Usage" in done.stdout


def test_the_installed_package_is_not_the_checkout(installed, tmp_path):
    code = "import zaya.training.trainer as t, zaya.eval.quality.suite as s; print(t.__file__, s.names())"
    done = run(installed / "bin" / "python", "-c", code, cwd=tmp_path, check=True)
    assert done.stdout.startswith(str(installed))
    assert "demo" in done.stdout
