"""Loading: defaults, short forms, units, places, the schema and the dataclasses, and a fuzz."""

import dataclasses
import json
import math
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from ppc.errors import Complaints, Location, PpcError, SpecError
from ppc.frontend import quantity
from ppc.frontend.devices import known
from ppc.frontend.load import load
from ppc.frontend.schema import example_of, schema
from ppc.ir import cluster
from ppc.ir import spec as forms
from ppc.ir.cluster import Link
from ppc.ir.spec import (
    Factory,
    Group,
    InputSpec,
    LrSchedule,
    Optimizer,
    RandomField,
    Spec,
)

root = Path(__file__).parent.parent

short = """\
model: {factory: torch.nn:Linear, args: {in_features: 4, out_features: 2}}
data: {source: random, samples: 8, fields: {input: {shape: [4]}}}
cluster: {devices_per_node: 2, device: cpu}
"""


@pytest.fixture
def read(tmp_path):
    """Loads a spec given as text."""

    def read(text: str) -> Spec:
        (tmp_path / "s.yaml").write_text(text, encoding="utf-8")
        return load(tmp_path / "s.yaml")

    return read


def test_defaults_fill_a_short_spec(read):
    spec = read(short)
    assert (spec.name, spec.version) == ("s", 1)
    assert spec.model.loss == "output"
    assert spec.model.inputs == ()
    assert spec.train == forms.Train()
    assert (spec.train.steps, spec.train.epochs) == (100, None)
    assert spec.data.last_batch == "keep"
    assert (spec.cluster.device, spec.cluster.links) == known["cpu"]
    parallel = spec.parallel
    assert (parallel.pipeline, parallel.microbatches, parallel.schedule) == (2, 8, "1f1b")
    assert parallel.cuts == "auto"


@pytest.mark.parametrize(
    ("parallel", "train", "expected"),
    [
        ("{}", "{}", (2, 8)),
        ("{pipeline: auto, microbatches: auto}", "{global_batch: 5}", (2, 5)),
        ("{cuts: [b]}", "{}", (2, 8)),
        ("{pipeline: 2, microbatches: 3}", "{}", (2, 3)),
    ],
)
def test_auto_degrees_become_numbers(read, parallel, train, expected):
    spec = read(f"{short}parallel: {parallel}\ntrain: {train}\n")
    assert (spec.parallel.pipeline, spec.parallel.microbatches) == expected


def test_auto_without_a_usable_cluster_is_no_crash(read):
    with pytest.raises(SpecError, match="devices_per_node is 0"):
        read(short.replace("devices_per_node: 2", "devices_per_node: 0"))


grouped = (
    "optimizer: {name: adamw, eps: 0.5, groups: "
    "[{params: '*.bias', eps: 1e-8}, {params: [a.*, b.*], lr: 1e-3, eps: 0.5}]}"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer: sgd", Optimizer(name="SGD")),
        ("optimizer: AdamW", Optimizer()),
        ("optimizer: {name: NADAM}", Optimizer(name="NAdam", lr=2e-3)),
        (
            "optimizer: {name: adamw, lr: 3e-4, betas: [0.9, 0.95], eps: 1e-8}",
            Optimizer(lr=3e-4, options={"betas": (0.9, 0.95)}),
        ),
        (
            "optimizer: {name: sgd, momentum: 0.9, nesterov: true}",
            Optimizer(name="SGD", options={"momentum": 0.9, "nesterov": True}),
        ),
        (
            grouped,
            Optimizer(
                options={"eps": 0.5},
                groups=(
                    Group(params=("*.bias",), options={"eps": 1e-8}),
                    Group(params=("a.*", "b.*")),
                ),
            ),
        ),
        ("lr_schedule: {name: step, every: 3}", LrSchedule(name="step", every=3)),
        ("lr_schedule: one_cycle", LrSchedule(name="one_cycle")),
        ("lr_schedule: math:sqrt", LrSchedule(name="math:sqrt")),
        ("clip_value: 0.5", 0.5),
        ("lr_schedule: cosine", LrSchedule(name="cosine")),
        ("lr_schedule: {name: linear, warmup: 5}", LrSchedule(name="linear", warmup=5)),
        ("lr_schedule: {warmup: 5}", LrSchedule(warmup=5)),
        ("timeout: 10min", 600.0),
        ("timeout: 2.5", 2.5),
        ("clip_norm: null", None),
        ("clip_norm: 1", 1),
        ("epochs: 3", 3),
    ],
)
def test_train_words_and_mappings(read, text, expected):
    train = read(f"{short}train: {{{text}}}\n").train
    assert getattr(train, text.partition(":")[0]) == expected
    assert train.steps == (None if "epochs" in text else 100)


def test_schedule_word_is_its_kind(read):
    for text in ("gpipe", "{kind: gpipe}"):
        assert read(f"{short}parallel: {{schedule: {text}}}\n").parallel.schedule == "gpipe"


def test_yaml_is_1_2(read):
    args = "{a: 3e-4, b: no, c: 2001-01-01, d: 0o17, e: [1, {f: ~}], g: {factory: torch:zeros}}"
    spec = read(re.sub(r"args: \{[^}]*\}", f"args: {args}", short))
    assert spec.model.factory.args == {
        "a": 3e-4,
        "b": "no",
        "c": "2001-01-01",
        "d": 15,
        "e": (1, {"f": None}),
        "g": Factory(target="torch:zeros"),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{input: x}", (("input", InputSpec(field="x")),)),
        ("[x, y]", ((None, InputSpec(field="x")), (None, InputSpec(field="y")))),
        (
            "{x: {shape: [batch, 3], dtype: float64}}",
            (("x", InputSpec(field="x", shape=("batch", 3), dtype="float64")),),
        ),
        ("{a: {field: x}}", (("a", InputSpec(field="x")),)),
    ],
)
def test_inputs(read, text, expected):
    fields = "{x: {shape: [3], dtype: float64}, y: {dtype: int64, high: 3}}"
    text = short.replace("model: {", f"model: {{inputs: {text}, ")
    assert read(text.replace("{input: {shape: [4]}}", fields)).model.inputs == expected


def test_shaped_inputs_are_random_fields(read):
    text = short.replace("model: {", "model: {inputs: {a: {shape: [batch, 4]}}, ")
    spec = read(text.replace(", fields: {input: {shape: [4]}}", ""))
    assert spec.data.fields == {"a": RandomField(shape=(4,))}


def test_every_source(read, tmp_path):
    (tmp_path / "x.npy").touch()
    (tmp_path / "x.safetensors").touch()
    (tmp_path / "d.py").write_text("class D: ...")

    def data(text):
        return read(re.sub(r"data: .*", f"data: {text}", short)).data

    assert data("{source: text, files: s.yaml, sequence: 4}").files == ("s.yaml",)
    assert data("{source: text, files: [s.yaml, '{stdlib}/*.py'], sequence: 4}").sequence == 4
    assert data("{source: arrays, files: {x: x.npy}}").files == {"x": "x.npy"}
    assert data("{source: arrays, files: x.safetensors, last_batch: drop}").last_batch == "drop"
    made = data("{source: d.py:D, args: {n: 3}, fields: [x, y]}")
    assert made == forms.Dataset(source="d.py:D", args={"n": 3}, fields=("x", "y"))


def test_devices_and_links(read):
    def cluster(text):
        return read(
            re.sub(r"cluster: .*", f"cluster: {{devices_per_node: 1, {text}}}", short)
        ).cluster

    assert cluster("device: h100").device.memory == 80_000_000_000
    made = cluster(
        "device: {kind: cuda, memory: 12GiB, flops: {fp32: 20TFLOP/s}, memory_bandwidth: 400GB/s}"
    )
    assert made.device.memory == 12 << 30
    assert made.device.flops == {"fp32": 20e12, "fp64": 10e12, "bf16": 20e12}
    assert made.device.memory_bandwidth == 400e9
    made = cluster("device: {kind: cpu, memory: 1GB}, links: {intra_node: {bandwidth: 8Gbit/s}}")
    assert made.device == dataclasses.replace(known["cpu"][0], memory=10**9)
    assert made.links.intra_node == Link(bandwidth=1e9, latency=known["cpu"][1].intra_node.latency)
    assert made.links.inter_node == known["cpu"][1].inter_node


units = {
    "bytes": quantity.bytes_units,
    "bandwidth": quantity.bandwidth_units,
    "duration": quantity.duration_units,
    "flops": quantity.flops_units,
}


@pytest.mark.parametrize("kind", units)
def test_quantities_and_the_schema_agree(kind):
    """What the pattern admits is read, each unit with and without a space, and nothing else."""
    rules = schema()["$defs"][kind]
    words, suffix = re.search(r"\(([A-Za-z/|]+)\)(.*)\$$", rules["pattern"]).groups()
    assert {word + suffix for word in words.split("|")} == set(units[kind])
    for unit, factor in units[kind].items():
        for text, number in ((f"1{unit}", 1), (f"2.5 {unit}", 2.5), (f"80{unit}", 80)):
            jsonschema.validate(text, rules)
            assert math.isclose(quantity.parse_quantity(text, units[kind]), number * factor)
    assert quantity.parse_quantity(7, units[kind]) == 7
    for text in ("80", "GiB", "1e3GB", "80gib", "-1us", "80GiBs", "1 parsec", "0x1B", "1..2s", ""):
        assert not re.search(rules["pattern"], text)
        with pytest.raises(ValueError, match="is not a number with one of"):
            quantity.parse_quantity(text, units[kind])


def test_units_by_hand():
    assert quantity.parse_quantity("80GiB", quantity.bytes_units) == 80 * 1024**3
    assert quantity.parse_quantity("450GB/s", quantity.bandwidth_units) == 450e9
    assert quantity.parse_quantity("100Gbit/s", quantity.bandwidth_units) == 12.5e9
    assert quantity.parse_quantity("5us", quantity.duration_units) == pytest.approx(5e-6)
    assert quantity.parse_quantity("10min", quantity.duration_units) == 600


def test_places(read, tmp_path):
    text = f"{short}parallel:\n  cuts:\n  - a\n  pipeline: 2\n"
    spec, file = read(text), str(tmp_path / "s.yaml")
    assert spec.at("parallel.cuts[0]") == Location(file, 6, 5)
    assert spec.at("parallel.pipeline") == Location(file, 7, 3)
    assert spec.at("model.factory") == Location(file, 1, 9)
    assert spec.at("model.args.in_features") == Location(file, 1, 42)
    assert spec.at("parallel.microbatches") == Location(file, 4, 1)
    assert spec.at("train.steps") == Location(file)
    assert spec.folder == tmp_path


def test_all_complaints_at_once_in_file_order(read):
    text = (
        short.replace("samples: 8", "samples: 0") + "train: {stepz: 3}\nparallel: {pipeline: 3}\n"
    )
    with pytest.raises(Complaints) as caught:
        read(text)
    assert [(e.where.line, e.message) for e in caught.value.errors] == [
        (2, "data.samples is 0; it must be at least 1"),
        (4, "unknown key 'stepz' in train"),
        (5, "pipeline 3 x data 1 needs 3 devices; the cluster has 2"),
    ]


def test_one_mistake_gives_one_complaint(read):
    """What depends on a wrong value is not complained about too."""
    text = short.replace("devices_per_node: 2", "devices_per_node: two")
    with pytest.raises(SpecError, match="devices_per_node is 'two'"):
        read(text + "parallel: {pipeline: 7}\n")


# ---------------------------------------------------------------- schema and dataclasses

sections = {
    name: rules for name, rules in schema()["$defs"].items() if name[0].isupper() and name != "Data"
}
computed = {"pipeline", "microbatches"}  # auto in the schema, numbers in the form
by_name = {name: getattr(forms, name, None) or getattr(cluster, name) for name in sections} | {
    "Spec": Spec
}


def keys_of(cls: type) -> set[str]:
    names = {field.name for field in dataclasses.fields(cls)} - {"path", "locations"}
    if cls is forms.Model:
        return names | {"args"}  # model.factory and model.args make one Factory
    return {"factory", "args"} if cls is Factory else names


@pytest.mark.parametrize("name", by_name)
def test_dataclasses_have_the_schema_s_keys(name):
    rules = schema() if name == "Spec" else sections[name]
    assert keys_of(by_name[name]) == set(rules["properties"])


@pytest.mark.parametrize("name", by_name)
def test_dataclasses_have_the_schema_s_defaults(name):
    rules = schema() if name == "Spec" else sections[name]
    for field in dataclasses.fields(by_name[name]):
        written = rules["properties"].get(field.name)
        if written is None or field.name in computed or (name, field.name) == ("Model", "factory"):
            continue
        target = schema()["$defs"][written["$ref"].rpartition("/")[2]] if "$ref" in written else {}
        stated = written.get("default", target.get("default"))
        if field.default_factory is not dataclasses.MISSING:
            made = field.default_factory()
            assert (plain(made) or None) == (stated or None)  # no keys: {} or nothing
        elif field.default is not dataclasses.MISSING:
            assert plain(field.default) == stated, f"{name}.{field.name}"
        else:
            assert stated is None, f"{name}.{field.name}"


def plain(default):
    """A default as the schema writes it."""
    if isinstance(default, Optimizer | LrSchedule) and default == type(default)():
        return default.name.lower()
    if default == forms.Weight():
        return default.kind
    if default == forms.Train():
        return None  # a section: its own keys have the defaults
    return list(default) if isinstance(default, tuple) else default


@pytest.mark.parametrize("name", by_name)
def test_literals_are_the_schema_s_words(name):
    rules = schema() if name == "Spec" else sections[name]
    hints = typing.get_type_hints(by_name[name])
    for key, written in rules["properties"].items():
        target = schema()["$defs"][written["$ref"].rpartition("/")[2]] if "$ref" in written else {}
        words = written.get("enum", target.get("enum"))
        if typing.get_origin(hints.get(key)) is typing.Literal and words:
            assert typing.get_args(hints[key]) == tuple(words), f"{name}.{key}"


def walk(rules, path=""):
    if isinstance(rules, dict):
        yield path, rules
        for key, value in rules.items():
            yield from walk(value, f"{path}/{key}")
    elif isinstance(rules, list):
        for index, value in enumerate(rules):
            yield from walk(value, f"{path}/{index}")


def test_every_key_has_a_description_and_an_example():
    for path, rules in walk(schema()):
        for name, written in rules.get("properties", {}).items():
            if "/if" in path or "/then" in path or (path.endswith("/else") and name == "kind"):
                continue
            ref = written.get("$ref", "").rpartition("/")[2]
            target = schema()["$defs"].get(ref, {})
            described = "description" in written or "description" in target or "const" in written
            assert described, f"{path}/{name} has no description"
            if path.startswith("/$defs"):
                exampled = "examples" in written or "examples" in target
                assert exampled, f"{path}/{name} has no example"


def test_examples_are_valid():
    draft = jsonschema.Draft202012Validator
    draft.check_schema(schema())
    for path, rules in walk(schema()):
        for value in rules.get("examples", []) if "/default" not in path else []:
            if path.endswith("/properties") or not (set(rules) - {"examples"}):
                continue
            draft({**rules, "$defs": schema()["$defs"]}).validate(value)


def test_devices_are_the_schema_s():
    device = schema()["$defs"]["Device"]
    assert device["then"]["enum"] == list(known)
    for name in known:
        assert name in device["description"]
    precisions = {"fp32", "fp64", "bf16"}
    assert all(set(device.flops) == precisions for device, _ in known.values())


def test_the_smallest_spec_the_schema_suggests_is_one(read):
    text = json.dumps(
        {key: example_of(schema()["properties"][key]) for key in schema()["required"]}
    )
    with pytest.raises(PpcError) as caught:
        read(text)
    assert "no file models/gpt.py" in str(caught.value)


# ---------------------------------------------------------------- robustness


def test_no_torch_and_no_user_code(tmp_path):
    (tmp_path / "m.py").write_text("raise SystemExit('user code ran')\ndef build(): ...\n")
    text = short.replace("torch.nn:Linear", "m.py:build")
    (tmp_path / "s.yaml").write_text(text)
    code = "import sys, ppc; ppc.load('s.yaml'); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


quickstart = (root / "specs/quickstart.yaml").read_bytes()
examples = [path.read_bytes() for path in sorted(root.glob("specs/*.yaml"))]
relaxed = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def answers(folder: Path, content: bytes) -> None:
    """A Spec or a PpcError that names the file, and nothing else."""
    path = folder / "fuzz.yaml"
    path.write_bytes(content)
    try:
        answer = load(path)
    except PpcError as error:
        answer = error
    if not isinstance(answer, Spec):
        errors = answer.errors if isinstance(answer, Complaints) else (answer,)
        assert all(error.where.file == str(path) and error.message for error in errors)


@relaxed
@given(st.binary(max_size=200))
@example(b"\xff\xfe")
@example(b"[" * 5000)
@example(b"a: &a [*a]")
@example(b"- \x00")
@example(b"? [1]\n: 2\n")
@example(b"%YAML 1.1\n---\na: yes\n")
@example(b"!!python/object/apply:os.system ['echo']\n")
def test_fuzz_bytes(tmp_path, content):
    answers(tmp_path, content)


@relaxed
@given(
    st.lists(
        st.tuples(st.integers(0, len(quickstart)), st.integers(0, 8), st.binary(max_size=4)),
        min_size=1,
        max_size=4,
    )
)
def test_fuzz_mutations(tmp_path, cuts):
    content = quickstart
    for start, length, patch in cuts:
        content = content[:start] + patch + content[start + length :]
    answers(tmp_path, content)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@relaxed
@given(st.data())
def test_fuzz_values(tmp_path, data):
    """Any value at any key of any of the example specs."""
    yaml = YAML(typ="safe", pure=True)
    tree = yaml.load(data.draw(st.sampled_from(examples)))
    places = [node for _, node in walk(tree) if node]
    place = data.draw(st.sampled_from(places))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(values)
    with (tmp_path / "dump.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(tree, file)
    answers(tmp_path, (tmp_path / "dump.yaml").read_bytes())


def test_alias_bomb_is_refused(read):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(SpecError, match="over 100000 values"):
        read("\n".join(lines))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.yaml", "no such file"),
        ("", "is a folder"),
        ("\0", "null byte"),
        ("s.yaml/x", "cannot be"),
    ],
)
def test_paths_that_cannot_be_read(tmp_path, name, message):
    (tmp_path / "s.yaml").touch()
    with pytest.raises(SpecError, match=message):
        load(str(tmp_path) + "/" + name)


def test_spec_is_frozen(read):
    spec = read(short)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "x"
    assert isinstance(forms.Data, types.UnionType)
