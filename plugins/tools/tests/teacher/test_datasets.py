"""`dstrain generate --dataset`: an image per row from its own noise, kept, continued
or refused; then trained on.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dstrain import Diverged, GenerateConfig, StateError, UsageError, generate
from dstrain.config import LoraFile, NamedInput
from dstrain.plugin import Constant
from dstrain.storage import temporary
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import family
from tests.support.family import DecodedImage, write, write_data
from tests.support.generating import generation, pixels, rows_of
from tests.support.runs import train

pytestmark = pytest.mark.usefixtures("tiny")

ROWS = [
    {"prompt": "dog", "seed": 3, "num_inference_steps": 2, "note": 'a "b", c'},
    {"prompt": "", "seed": 4, "num_inference_steps": 1, "note": ["b"]},
    {"prompt": "dog", "seed": 4, "num_inference_steps": 2, "note": "line\nbreak"},
]


def shape_of_area(height: int, width: int, area: int) -> tuple[int, ...]:
    return family.latent_shape(height, width)


OF_AREA = replace(
    family.BASE,
    inputs={**family.BASE.inputs, "area": Constant(64)},
    latent_shape=shape_of_area,
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return rewritten(tmp_path / "prompts.json", ROWS)


def rewritten(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture
def config(model: Path, table: Path, tmp_path: Path) -> GenerateConfig:
    """A dataset of three rows in the folder `set`."""
    return generation(model, tmp_path / "set", dataset=table, num_inference_steps=3)


def written(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.iterdir()
    }


def decoding(
    patch: pytest.MonkeyPatch, stop_at: int = 0, variant: str = "base"
) -> list[Tensor]:
    """Note the latents of each image that is decoded; this call is interrupted."""
    calls: list[Tensor] = []

    def decode(latents: Tensor, *, vae: Any) -> DecodedImage:
        calls.append(latents)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return family.decode(latents, vae=vae)

    spec = replace(family.PIPELINES[variant], decoders=(decode,))
    patch.setitem(family.PIPELINES, variant, spec)
    return calls


def test_each_row_gives_the_image_that_its_prompt_and_seed_give_alone(
    config: GenerateConfig, model: Path, tmp_path: Path
) -> None:
    generate(config)
    rows = rows_of(config.output)
    assert [{name: row[name] for name in ROWS[0]} for row in rows] == [
        {name: str(one).replace("'", '"') for name, one in row.items()} for row in ROWS
    ]
    for i, row in enumerate(ROWS):
        alone = tmp_path / f"{i}.png"
        given = {"prompt": row["prompt"], "seed": row["seed"]}
        generate(generation(model, alone, num_inference_steps=3, **given))
        assert pixels(alone) == pixels(config.output / rows[i]["image"])
    assert len({row["image"] for row in rows}) == 3


def test_a_column_that_one_variant_alone_reads_chooses_it(
    config: GenerateConfig, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = decoding(monkeypatch, variant="other")
    rewritten(table, [{**row, "mood": "calm"} for row in ROWS])
    generate(replace(config, variant=None, model_paths=None, toy=True))
    assert len(calls) == len(ROWS)


def test_a_run_that_was_stopped_resumes_and_one_that_is_done_makes_nothing(
    config: GenerateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = decoding(monkeypatch, stop_at=2)
    with pytest.raises(KeyboardInterrupt):
        generate(config)
    assert not (config.output / "metadata.csv").exists()
    kept = written(config.output / "image")
    assert len(kept) == 1
    temporary(config.output / "image/b.png").write_bytes(b"half")
    generate(config)
    assert len(calls) == 4
    finished = written(config.output / "image")
    assert len(finished) == 3
    assert kept.items() <= finished.items()
    generate(config)
    assert (len(calls), written(config.output / "image")) == (4, finished)


def test_a_changed_row_is_regenerated_and_the_others_are_kept(
    config: GenerateConfig, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(config)
    before = written(config.output / "image")
    others = [{**ROWS[0], "num_inference_steps": 9}, {**ROWS[1], "prompt": "cat"}]
    rewritten(table, [*others, ROWS[2]])
    generate(config)
    assert "generating 1 of 3 " in capsys.readouterr().err
    assert before.items() <= written(config.output / "image").items()
    steps = [row["num_inference_steps"] for row in rows_of(config.output)]
    assert steps == ["9", "1", "2"]


def test_a_folder_of_eulers_rule_is_continued_whether_it_is_named_or_not(
    config: GenerateConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(config)
    generate(replace(config, sampler="euler"))
    assert "generating 0 of 3 " in capsys.readouterr().err


def test_other_settings_are_refused_naming_the_difference(
    config: GenerateConfig, model: Path, tmp_path: Path
) -> None:
    generate(config)
    for changes, difference in (
        ({"mixed_precision": "bf16"}, r"dtype: .*float32.* bfloat16"),
        ({"num_inference_steps": 4}, r"num_inference_steps: \D*3\D*4\n"),
        ({"guidance_scale": 2.0}, r"guidance_scale: .*None.* 2\.0"),
        ({"height": 8, "width": 24}, r"height: \D*16\D*8; width: \D*16\D*24\n"),
    ):
        with pytest.raises(StateError, match=difference):
            generate(replace(config, **changes))
    write(tmp_path / "other", seed=1)
    other = generation(tmp_path / "other", config.output).model_paths
    with pytest.raises(StateError, match=r"of dit: .*of text_encoder: .*of vae: "):
        generate(replace(config, model_paths=other))
    guided = replace(config, output=tmp_path / "guided", guidance_scale=2.0)
    generate(guided)
    with pytest.raises(StateError, match=r"guidance_scale: .*2\.0.* None"):
        generate(replace(guided, guidance_scale=None))


def test_what_is_said_of_a_lora_where_it_is_named_is_a_setting(
    config: GenerateConfig, tmp_path: Path
) -> None:
    """With another alpha, or on another component, the same file makes other images."""
    write_data(tmp_path / "data", ("dog",))
    trained = train(tmp_path, model_paths=config.model_paths, max_steps=1)
    lora = tmp_path / "lora.safetensors"
    save_file(load_file(trained / "epoch-0.safetensors"), lora)
    for _ in range(2):
        generate(replace(config, lora=(LoraFile(lora, alpha="rank"),)))
    for others in (
        (),
        (LoraFile(lora, alpha=7.0),),
        (LoraFile(lora, 0.5, alpha="rank"),),
        (LoraFile(lora, alpha="rank", skip_missing=True),),
        (LoraFile(lora, alpha="rank", component="dit"),),
    ):
        with pytest.raises(StateError, match="LoRA: "):
            generate(replace(config, lora=others))


@pytest.mark.parametrize(
    ("rows", "flags", "where"),
    [
        ([{"prompt": "dog"}], {}, "bad.json: .*'seed'"),
        ([{"prompt": "dog", "seed": ""}], {}, "bad.json:1:seed"),
        ([{"prompt": "dog", "seed": "one"}], {}, "bad.json:1:seed: 'one'"),
        (
            [{"prompt": "dog", "seed": 1, "rand_device": "mps"}],
            {},
            "bad.json:1:rand_device: .*'mps'",
        ),
        ([{"prompt": "dog", "seed": 1, "image": "a.png"}], {}, "'image'"),
        ([{"seed": 1}], {}, "'prompt'"),
        (
            [{"prompt": "dog", "seed": 1, "height": 16}],
            {"height": 16, "width": 16},
            "--height: .*bad.json",
        ),
        ([{"prompt": "dog", "seed": 1}], {"trajectory": True}, "num_inference_steps"),
        (
            [{"prompt": "dog", "seed": 1, "num_inference_steps": 2, "trajectory": "a"}],
            {"trajectory": True},
            "'trajectory'",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused_before_anything_is_loaded_or_written(
    rows: list[dict[str, Any]],
    flags: dict[str, Any],
    where: str,
    config: GenerateConfig,
    tmp_path: Path,
) -> None:
    bad = rewritten(tmp_path / "bad.json", rows)
    with pytest.raises(UsageError, match=where):
        generate(replace(config, dataset=bad, **flags))
    assert not (config.output / "generated.json").exists()


@pytest.mark.parametrize("is_the_table", [False, True])
def test_a_folder_with_a_dataset_of_the_user_is_left_as_it_is(
    is_the_table: bool, config: GenerateConfig, table: Path, tmp_path: Path
) -> None:
    path = config.output / "metadata.csv"
    path.parent.mkdir()
    path.write_text("prompt,seed\ndog,1\n")
    given = path if is_the_table else table
    output = tmp_path / "other/../set"
    with pytest.raises(UsageError, match=r"metadata\.csv"):
        generate(replace(config, dataset=given, output=output))
    assert path.read_text() == "prompt,seed\ndog,1\n"


def test_a_folder_is_bound_by_settings_once_something_was_made_by_them(
    config: GenerateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding(monkeypatch, stop_at=1)
    with pytest.raises(KeyboardInterrupt):
        generate(config)
    assert not (config.output / "generated.json").exists()
    generate(replace(config, num_inference_steps=2))
    assert len(rows_of(config.output)) == 3
    (config.output / "metadata.csv").unlink()
    with pytest.raises(StateError, match="num_inference_steps"):
        generate(config)
    for variant in ("base", "other"):
        monkeypatch.setitem(family.PIPELINES, variant, OF_AREA)
        with pytest.raises(StateError, match=r"area: .*None.* 64") as caught:
            generate(replace(config, variant=variant))
        assert ("variant: " in str(caught.value)) == (variant == "other")


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff"])
def test_damaged_settings_are_named_and_nothing_is_made(
    damage: bytes, config: GenerateConfig
) -> None:
    generate(config)
    before = written(config.output / "image")
    (config.output / "generated.json").write_bytes(damage)
    with pytest.raises(StateError, match=r"generated\.json"):
        generate(replace(config, num_inference_steps=9))
    assert written(config.output / "image") == before


@pytest.mark.parametrize(
    ("scale", "unread"),
    [(None, ["negative_prompt", "promt", "area"]), (2.0, ["promt", "area"])],
)
def test_columns_that_neither_inference_nor_distillation_reads_are_named(
    scale: float | None,
    unread: list[str],
    config: GenerateConfig,
    table: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(family.PIPELINES, "base", OF_AREA)
    row = {"prompt": "dog", "seed": 1, "cfg_scale": 1, "num_inference_steps": 2}
    rewritten(table, [{**row, "negative_prompt": "", "promt": "cat", "area": 9}])
    generate(replace(config, guidance_scale=scale))
    lines = capsys.readouterr().err.splitlines()
    warnings = [line for line in lines if "warning" in line]
    assert all(str(table) in line for line in warnings)
    assert [line.split("'")[1] for line in warnings] == unread


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ({"negative_prompt": "blurry"}, "--negative_prompt"),
        ({"num_frames": 5}, "--num_frames"),
        ({"input": (NamedInput("prompt", "cat"),)}, "--input prompt"),
        ({"prompt": "a cat"}, "--prompt"),
        ({"seed": 7}, "--seed"),
        ({"dataset": None}, "--prompt"),
    ],
)
def test_flags_that_no_row_uses_or_that_are_columns_are_refused(
    flags: dict[str, Any], where: str, config: GenerateConfig
) -> None:
    with pytest.raises(UsageError) as refused:
        generate(replace(config, **flags))
    assert refused.value.where == where
    assert not (config.output / "generated.json").exists()


def test_flags_give_what_all_rows_share(
    config: GenerateConfig, model: Path, table: Path, tmp_path: Path
) -> None:
    rewritten(table, [{"seed": 1}, {"seed": 2}])
    shared = {"num_inference_steps": 3, "height": 8, "width": 24}
    generate(replace(config, input=(NamedInput("prompt", "cat"),), **shared))
    one = tmp_path / "one.png"
    generate(generation(model, one, prompt="cat", seed=2, **shared))
    assert pixels(one) == pixels(config.output / rows_of(config.output)[1]["image"])
    with pytest.raises(StateError, match=r"prompt: .*cat.* .*dog"):
        generate(replace(config, input=(NamedInput("prompt", "dog"),), **shared))


def test_trajectories_are_added_to_images_that_are_there_and_kept(
    config: GenerateConfig, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = decoding(monkeypatch)
    generate(config)
    before = written(config.output / "image")
    with_trajectories = replace(config, trajectory=True)
    generate(with_trajectories)
    assert (len(calls), written(config.output / "image")) == (6, before)
    stored = written(config.output / "trajectory")
    for row in rows_of(config.output):
        name = f"{Path(row['image']).stem}-{row['num_inference_steps']}.safetensors"
        assert row["trajectory"] == f"trajectory/{name}"
    rewritten(table, [{**ROWS[0], "num_inference_steps": 1}, *ROWS[1:]])
    generate(with_trajectories)
    assert (len(calls), written(config.output / "image")) == (7, before)
    assert stored.items() < written(config.output / "trajectory").items()
    generate(with_trajectories)
    assert len(calls) == 7


def test_what_is_not_finite_names_its_row_and_leaves_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict_infinity(
        noisy_latents: Any,
        timestep: Any,
        prompt_emb: Any,
        prompt_mask: Any,
        *,
        dit: Any,
    ) -> Any:
        return noisy_latents / 0

    spec = replace(family.BASE, model_fn=predict_infinity)
    monkeypatch.setitem(family.PIPELINES, "base", spec)
    write(tmp_path / "model")
    (tmp_path / "rows.csv").write_text("prompt,seed\ndog,1\n")
    config = generation(
        tmp_path / "model", tmp_path / "set", dataset=tmp_path / "rows.csv"
    )
    with pytest.raises(Diverged) as caught:
        generate(config)
    assert caught.value.where.startswith("rows.csv:2: ")
    assert not [*tmp_path.rglob("*.png")]
