"""The seams into vLLM: as the table says, replaced as a whole or not at all, and by nobody's harm.

Run as a script, this file looks at vLLM in a process of its own; see `main`.
"""

import ast
import contextlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from wmtp_vllm import plugin, replacements, seams

pytestmark = pytest.mark.unit

WRAPPED = [seam for seam in seams.SEAMS if seam.use in ("selects", "wrapped")]
HERE = "0.32"
"""The minor release that is installed."""
PLACES = [place for seam in WRAPPED for place in seam.places[HERE]]
SELECTING = [place for seam in seams.SEAMS if seam.use == "selects" for place in seam.places[HERE]]
SOURCES_033 = "WMTP_VLLM_033_SOURCES"


def at(place: str) -> Any:
    """What is at a place, without binding it."""
    owner, attribute = seams._locate(place)
    return inspect.getattr_static(owner, attribute)


def everything() -> dict[str, Any]:
    return {place: at(place) for place in PLACES}


@pytest.fixture
def untouched(plugin_registered: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM as it was before any seam was replaced; after the test the seams are as found again."""
    for place in PLACES:
        owner, attribute = seams._locate(place)
        original = seams._unwrapped(getattr(owner, attribute))
        is_static = isinstance(at(place), staticmethod)
        monkeypatch.setattr(owner, attribute, staticmethod(original) if is_static else original)
    return everything()


class TestTable:
    def test_fits_the_installed_vllm(self) -> None:
        assert seams.minor_version() == HERE
        verdicts = seams.check()
        assert [verdict for verdict in verdicts if verdict.problem] == []
        assert {v.place for v in verdicts} == {p for s in seams.SEAMS for p in s.places[HERE]}

    def test_says_a_place_and_parameters_for_every_release(self) -> None:
        for seam in seams.SEAMS:
            assert seam.use in ("selects", "wrapped", "called", "overridden")
            assert tuple(seam.places) == tuple(seam.parameters) == seams.VERSIONS
            for version in seams.VERSIONS:
                assert bool(seam.places[version]) == bool(seam.parameters[version])

    def test_every_wrapped_seam_has_a_replacement_and_no_replacement_is_idle(self) -> None:
        functions = {
            name
            for name, value in vars(replacements).items()
            if inspect.isfunction(value)
            and value.__module__ == replacements.__name__
            and not name.startswith("_")
        }
        assert functions == {seam.name for seam in WRAPPED}

    @pytest.mark.parametrize("version", seams.VERSIONS)
    @pytest.mark.parametrize("seam", WRAPPED, ids=lambda seam: seam.name)
    def test_a_replacement_takes_what_the_seam_takes(self, seam: seams.Seam, version: str) -> None:
        parameters = seam.parameters[version]
        replacement = inspect.signature(getattr(replacements, seam.name))
        kinds = {parameter.kind for parameter in replacement.parameters.values()}
        positional = len(parameters) if inspect.Parameter.VAR_POSITIONAL in kinds else 3
        if parameters:
            replacement.bind(
                None, *parameters[:positional], **dict.fromkeys(parameters[positional:])
            )

    def test_overridden_methods_keep_their_parameters(self) -> None:
        from wmtp_vllm.kv_manager.manager import RingManager
        from wmtp_vllm.kv_manager.planning import RingKVCacheConfig

        for seam in (seam for seam in seams.SEAMS if seam.use == "overridden"):
            owner = RingKVCacheConfig if seam.name == "num_blocks_of" else RingManager
            assert seam.name in vars(owner)
            ours = inspect.signature(getattr(owner, seam.name)).parameters
            assert tuple(ours) == seam.parameters[HERE]


class TestApply:
    def test_replaces_every_seam_once(self, untouched: dict[str, Any]) -> None:
        seams.apply()
        applied = everything()
        assert all(applied[place] is not untouched[place] for place in PLACES)
        seams.apply()
        seams.apply_selection()
        assert everything() == applied

    def test_a_replaced_seam_still_answers_for_the_original(
        self, untouched: dict[str, Any]
    ) -> None:
        seams.apply()
        for seam in WRAPPED:
            if seam.places[HERE]:
                expected = untouched[seam.places[HERE][0]]
                assert seams.original(seam.name) is getattr(expected, "__func__", expected)
        assert not [verdict for verdict in seams.check() if verdict.problem]

    def test_selection_replaces_the_method_name_only(self, untouched: dict[str, Any]) -> None:
        seams.apply_selection()
        changed = {place for place in PLACES if at(place) is not untouched[place]}
        assert changed == set(SELECTING)

    @pytest.mark.parametrize("place", [p for s in seams.SEAMS for p in s.places[HERE]])
    def test_a_seam_that_moved_is_refused_as_a_whole(
        self, untouched: dict[str, Any], monkeypatch: pytest.MonkeyPatch, place: str
    ) -> None:
        owner, attribute = seams._locate(place)
        monkeypatch.delattr(owner, attribute)
        with pytest.raises(seams.UnsupportedVLLM, match=r"does not fit vLLM 0\.32") as refusal:
            seams.apply()
        # Where a base class has one of the name, it takes other parameters.
        wrong = (f"{place}: not found", f"{place}: takes")
        assert any(problem in str(refusal.value) for problem in wrong)
        assert all(at(p) is untouched[p] for p in PLACES if p != place)

    @pytest.mark.parametrize("place", PLACES)
    def test_a_seam_of_another_signature_is_refused_as_a_whole(
        self, untouched: dict[str, Any], monkeypatch: pytest.MonkeyPatch, place: str
    ) -> None:
        def other(something: Any, entirely: Any, different: Any, from_before: Any) -> None: ...

        owner, attribute = seams._locate(place)
        monkeypatch.setattr(owner, attribute, other)
        before = everything()
        with pytest.raises(seams.UnsupportedVLLM) as refusal:
            seams.apply()
        assert everything() == before
        message = str(refusal.value)
        seam = next(seam for seam in seams.SEAMS if place in seam.places[HERE])
        assert message.startswith("windowed_mtp does not fit vLLM 0.32.")
        assert f"{place}: takes (something, entirely, different, from_before)" in message
        assert f"expected ({', '.join(seam.parameters[HERE])})" in message
        assert "`wmtp check` prints all seams" in message
        assert 'Install an unchanged supported vLLM, or select method "mtp"' in message

    def test_a_seam_that_is_no_function_is_refused(
        self, untouched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("vllm.v1.engine.core.get_kv_cache_configs", None)
        with pytest.raises(
            seams.UnsupportedVLLM, match="get_kv_cache_configs: is no function: None"
        ):
            seams.apply()

    def test_all_that_is_wrong_is_said_at_once(
        self, untouched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for place in PLACES[2:4]:
            owner, attribute = seams._locate(place)
            monkeypatch.setattr(owner, attribute, lambda: None)
        with pytest.raises(seams.UnsupportedVLLM) as refusal:
            seams.apply()
        assert all(place in str(refusal.value) for place in PLACES[2:4])

    def test_nothing_is_replaced_where_the_manager_cannot_be_registered(
        self, untouched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken() -> None:
            raise RuntimeError("no registry")

        monkeypatch.setattr("wmtp_vllm.kv_manager.manager.register", broken)
        with pytest.raises(RuntimeError, match="no registry"):
            seams.apply()
        assert everything() == untouched


class TestVersion:
    @pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "0.320.0", "1.0", "0.1.dev5+g0"])
    def test_one_outside_the_tested_range_is_refused_where_the_method_is_selected(
        self,
        untouched: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch,
        tiny_model: Callable[..., str],
        version: str,
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs

        monkeypatch.setattr("vllm.__version__", version)
        plugin.register()
        speculative = {"method": "windowed_mtp", "num_speculative_tokens": 3}
        with pytest.raises(seams.UnsupportedVLLM) as refusal:
            EngineArgs(tiny_model("dense"), speculative_config=speculative).create_engine_config()
        assert str(refusal.value) == (
            f"windowed_mtp runs in vLLM 0.32.x and 0.33.x, but vLLM {version} is installed. Install "
            'a supported vLLM, a newer wmtp-vllm, or select method "mtp".'
        )
        changed = {place for place in PLACES if at(place) is not untouched[place]}
        assert changed == set(SELECTING)

    @pytest.mark.parametrize("version", ["0.32.0", "0.32.7+cpu", "0.33.1", "0.33.0rc1"])
    def test_any_patch_release_of_a_tested_one_is_taken(
        self, monkeypatch: pytest.MonkeyPatch, version: str
    ) -> None:
        monkeypatch.setattr("vllm.__version__", version)
        assert seams.minor_version() in seams.VERSIONS


class TestRegister:
    def test_is_idempotent(self, untouched: dict[str, Any]) -> None:
        plugin.register()
        registered = everything()
        plugin.register()
        assert everything() == registered
        assert {place for place in PLACES if registered[place] is not untouched[place]} == set(
            SELECTING
        )

    @pytest.mark.parametrize(
        "broken", ["apply_selection", "_refuse_misfits", "_put_in_place", "_locate", "vllm_version"]
    )
    def test_never_raises_whatever_raises_inside(
        self,
        untouched: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        broken: str,
    ) -> None:
        def explode(*_: Any) -> None:
            raise RuntimeError("everything is broken")

        with monkeypatch.context() as patch:
            patch.setattr(seams, broken, explode)
            plugin.register()
        assert everything() == untouched
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("place", SELECTING)
    def test_never_raises_where_a_seam_moved(
        self, untouched: dict[str, Any], monkeypatch: pytest.MonkeyPatch, place: str
    ) -> None:
        owner, attribute = seams._locate(place)
        with monkeypatch.context() as patch:
            patch.delattr(owner, attribute)
            plugin.register()
        assert everything() == untouched

    def test_without_vllm_it_is_quiet_and_selecting_says_so(self) -> None:
        program = (
            "import sys; sys.modules['vllm'] = None\n"
            "from wmtp_vllm import plugin, seams\n"
            "plugin.register()\n"
            "try: seams.apply()\n"
            "except seams.UnsupportedVLLM as error: print(error)\n"
        )
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert "but no vLLM is installed" in ran.stdout

    @pytest.mark.parametrize(
        "speculative",
        [
            None,
            {"method": "mtp", "num_speculative_tokens": 3},
            {"method": "ngram", "num_speculative_tokens": 2},
        ],
        ids=["none", "mtp", "ngram"],
    )
    def test_leaves_the_configs_of_other_methods_as_they_are(
        self,
        untouched: dict[str, Any],
        tiny_model: Callable[..., str],
        speculative: dict[str, Any] | None,
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs

        def make() -> Any:
            keys = dict(speculative) if speculative else None
            return EngineArgs(tiny_model("dense"), speculative_config=keys).create_engine_config()

        before = make()
        plugin.register()
        after = make()
        assert after.compute_hash() == before.compute_hash()
        assert after.additional_config == before.additional_config == {}
        assert repr(after.speculative_config) == repr(before.speculative_config)


class TestFreshProcess:
    """What changes in all of vLLM: the identity of every attribute of its modules and classes."""

    @pytest.fixture(scope="class")
    def report(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        path = tmp_path_factory.mktemp("seams") / "report.json"
        environment = os.environ | {"VLLM_LOGGING_LEVEL": "INFO"}
        subprocess.run([sys.executable, __file__, str(path)], check=True, env=environment)
        report: dict[str, Any] = json.loads(path.read_text())
        return report

    def test_all_of_vllm_that_is_loaded_is_looked_at(self, report: dict[str, Any]) -> None:
        assert report["attributes"] > 10_000

    def test_importing_and_registering_changes_the_method_name_only(
        self, report: dict[str, Any]
    ) -> None:
        assert report["import"] == []
        assert report["register"] == sorted(SELECTING)
        assert report["register again"] == []

    def test_registering_loads_no_more_of_vllm(self, report: dict[str, Any]) -> None:
        assert report["loaded by register"] == []

    def test_registering_says_nothing(self, report: dict[str, Any]) -> None:
        assert report["said"] == ""

    def test_selecting_changes_the_seams_and_nothing_else(self, report: dict[str, Any]) -> None:
        assert report["apply"] == sorted(set(PLACES) - set(SELECTING))
        assert report["apply again"] == []


class TestSources:
    """The table against the sources of each release, read and not imported."""

    @pytest.fixture(params=seams.VERSIONS)
    def release(self, request: pytest.FixtureRequest) -> tuple[str, Path]:
        version: str = request.param
        if version == HERE:
            spec = importlib.util.find_spec("vllm")
            assert spec is not None
            assert spec.origin is not None
            return version, Path(spec.origin).parents[1]
        sources = os.environ.get(SOURCES_033)
        if not sources:
            pytest.skip(
                f"{SOURCES_033} names no folder with the unpacked wheel of vLLM {version}.0"
            )
        assert (Path(sources) / "vllm").is_dir(), f"{SOURCES_033}={sources} has no folder vllm"
        return version, Path(sources)

    @pytest.mark.parametrize("seam", seams.SEAMS, ids=lambda seam: seam.name.replace(" ", "-"))
    def test_have_every_seam_where_and_as_the_table_says(
        self, seam: seams.Seam, release: tuple[str, Path]
    ) -> None:
        version, folder = release
        for place in seam.places[version]:
            assert parameters_in_source(folder, place) == seam.parameters[version], place


def parameters_in_source(folder: Path, place: str) -> tuple[str, ...]:
    """Names of the parameters of the function, method or dataclass at `place`."""
    module, _, qualified = place.partition(":")
    file = folder.joinpath(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    found: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    for name in qualified.split("."):
        found = _defined(found, name)
        if isinstance(found, ast.ImportFrom):
            parents = module.split(".")[: -found.level] if found.level else []
            origin = ".".join([*parents, found.module or ""])
            return parameters_in_source(folder, f"{origin}:{name}")
    if isinstance(found, ast.ClassDef):
        fields = [node for node in found.body if isinstance(node, ast.AnnAssign)]
        fields.sort(key=lambda field: "kw_only=True" in ast.unparse(field))
        return tuple(ast.unparse(field.target) for field in fields)
    assert isinstance(found, ast.FunctionDef)
    taken = found.args
    names = tuple(arg.arg for arg in [*taken.posonlyargs, *taken.args, *taken.kwonlyargs])
    # A class method is bound when it is looked up, and its signature then without the class.
    is_bound = "classmethod" in map(ast.unparse, found.decorator_list)
    return names[1:] if is_bound else names


def _defined(owner: Any, name: str) -> ast.AST:
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            return node
    raise AssertionError(f"{name} is not defined in {getattr(owner, 'name', 'the module')}")


def attributes_of_vllm() -> dict[str, Any]:
    """Every attribute of vLLM's loaded modules and of their classes, by place."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "vllm" or module is None:
            continue
        for name, value in list(vars(module).items()):
            found[f"{module_name}:{name}"] = value
            if inspect.isclass(value) and value.__module__ == module_name:
                for attribute, of_class in list(vars(value).items()):
                    found[f"{module_name}:{name}.{attribute}"] = of_class
    return found


def changes(before: dict[str, Any]) -> list[str]:
    after = attributes_of_vllm()
    nothing = object()
    return sorted(
        place
        for place in before.keys() | after.keys()
        if before.get(place, nothing) is not after.get(place, nothing)
    )


@contextlib.contextmanager
def saying() -> Iterator[Callable[[], str]]:
    """What this process writes to its standard output and error streams, by file descriptor."""
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(descriptor) for descriptor in (1, 2)]
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)

        def said() -> str:
            sys.stdout.flush()
            sys.stderr.flush()
            return os.pread(file.fileno(), 1 << 20, 0).decode()

        try:
            yield said
        finally:
            for descriptor, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)


def main(path: str) -> None:
    """Register and select the plugin in this process, and report what that changes in vLLM."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "wmtp_vllm"]:
        del sys.modules[name]
    importlib.import_module("vllm.engine.arg_utils")
    before, loaded = attributes_of_vllm(), set(sys.modules)
    report: dict[str, Any] = {"attributes": len(before)}
    changed_by = partial(changes, before)
    with saying() as said:
        importlib.import_module("wmtp_vllm")
        report["import"] = changed_by()
        importlib.import_module("wmtp_vllm.plugin").register()
        report["register"] = changed_by()
        before.update(attributes_of_vllm())
        importlib.import_module("wmtp_vllm.plugin").register()
        report["register again"] = changed_by()
        report["said"] = said()
    more = {name for name in set(sys.modules) - loaded if name.partition(".")[0] == "vllm"}
    report["loaded by register"] = sorted(more)

    fresh = importlib.import_module("wmtp_vllm.seams")
    fresh.check()  # loads what the seams are in
    importlib.import_module("wmtp_vllm.kv_manager.manager")
    before.update(attributes_of_vllm())
    fresh.apply()
    report["apply"] = changed_by()
    before.update(attributes_of_vllm())
    fresh.apply()
    report["apply again"] = changed_by()
    Path(path).write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
