"""Services: the model's own answers at every level, tasks that come and go, nothing compiled while they classify."""

import contextlib
import dataclasses
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import InvalidStateError

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoints import CheckpointError
from jaxinfer.compiled import Costs
from jaxinfer.compiled.spec import ProgramSpec
from jaxinfer.elastic import (
    Dataset,
    Division,
    ElasticError,
    InvalidImageError,
    LevelError,
    MergeSchedule,
    ProfileError,
    Service,
    TaskExistsError,
    TrainingConfig,
    UnknownTaskError,
)
from jaxinfer.elastic.latency import NEWEST, LatencyProfile
from jaxinfer.elastic.scheduling.policies import FixedLevel
from jaxinfer.elastic.tasks.training import fit_head
from jaxinfer.models.config import ImagePooling
from jaxinfer.models.files.loading import load_model, save_model
from jaxinfer.serving import FailedError, OverloadedError
from jaxinfer.serving.budget import BudgetError, host_budget
from tests.elastic.vits import CONFIG, QUICK, SIZE, TOLERANCE, logits, save_vit, stripes, tiny_vit


@pytest.fixture
def empty(vit, tmp_path, options):
    """A service without tasks."""
    return Service.from_checkpoint(vit, repository=tmp_path / "tasks", **options)


def test_unknown_options_are_refused_by_name(vit, tmp_path):
    with pytest.raises(TypeError, match="Service has no option max_bath; known: merge_levels, prompt_mode"):
        Service.from_checkpoint(vit, repository=tmp_path, max_bath=2)


def probabilities(rows):
    rows = np.exp(rows - rows.max(axis=1, keepdims=True))
    return rows / rows.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("level", [-4, 0, 2])
def test_answers_are_the_models_own(service, level):
    task, images = service.task("stripes"), stripes(5, seed=3).images
    head = task.heads[max(level, 0)]
    wanted = logits(tiny_vit(), service.adaptation(level), images, head.weight, head.bias, task.prompts.get(level))
    answers = service.classify(images, "stripes", level)
    np.testing.assert_allclose([a.probabilities for a in answers], probabilities(wanted), rtol=0, atol=TOLERANCE)
    assert [a.label for a in answers] == [task.labels[i] for i in wanted.argmax(1)]
    assert {a.level for a in answers} == {level}


@pytest.mark.slow
def test_backbones_with_registers_and_other_features(options, tmp_path):
    """As DINOv2 with registers: no labels, and heads of tasks see the class token beside the mean of patches."""
    config = dataclasses.replace(CONFIG, labels=(), registers=3, pooling=ImagePooling.CLS_AND_MEAN)
    save_model(tmp_path / "vit", tiny_vit(config=config), family="dinov2_with_registers")
    options = options | {"max_batch": 1}
    with Service.from_checkpoint(tmp_path / "vit", repository=tmp_path / "tasks", **options) as service:
        head = service.register_task("stripes", stripes(20), training=QUICK).heads[0]
        images = stripes(3, seed=3).images
        expected = logits(tiny_vit(config=config), service.adaptation(-4), images, head.weight, head.bias)
        answers = service.classify(images, "stripes", -4)
    np.testing.assert_allclose([a.probabilities for a in answers], probabilities(expected), rtol=0, atol=TOLERANCE)


def test_the_task_is_learnt(service):
    unseen = stripes(200, seed=9)
    for level in service.levels:
        answers = service.classify(unseen.images, "stripes", level)
        right = np.mean([a.label == unseen.names[label] for a, label in zip(answers, unseen.labels, strict=True)])
        assert right > 0.85, level


def test_level_0_is_the_plain_model_to_the_bit(vit, service):
    images = stripes(2).images
    model = load_model(vit)
    plain = tiny_vit()
    adapted = jax.jit(lambda images: plain.features(images, service.adaptation(0)))
    np.testing.assert_array_equal(jax.jit(lambda images: plain.features(images))(images), adapted(images))
    assert model.config == CONFIG
    assert service.accuracy("stripes", 0).difference == 0


def test_nothing_is_compiled_twice(service, monkeypatch):
    service.compile_ahead()

    def refuse(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr(ProgramSpec, "compile", refuse)
    for level in service.levels:
        for count in (1, 2, 3, 5):
            assert len(service.classify(stripes(count).images, "stripes", level)) == count


def test_one_image_or_none(service):
    image = stripes(1).images[0]
    assert len(service.classify(image, "stripes")) == 1
    assert service.classify(np.zeros((0, SIZE, SIZE, 3), np.uint8), "stripes") == []


def test_tasks_are_mixed_in_a_batch(vit, registered, options, tmp_path):
    folder = shutil.copytree(registered, tmp_path / "tasks")
    mixed = Service.from_checkpoint(vit, repository=folder, **options)
    mixed.register_task("other", stripes(seed=5, names=("a", "b", "c")), prompts=[2], training=QUICK)
    images, tasks = stripes(4, seed=7).images, ["stripes", "other", "other", "stripes"]
    for level in (-4, 0, 2):
        together = mixed.classify(images, tasks, level)
        for row, name in enumerate(tasks):
            alone = mixed.classify(images[row], name, level)[0]
            np.testing.assert_allclose(together[row].probabilities, alone.probabilities, rtol=0, atol=TOLERANCE)
            assert len(alone.probabilities) == len(mixed.task(name).labels)
    with pytest.raises(ElasticError, match="is one more than max_tasks=2"):
        mixed.register_task("third", stripes(), training=QUICK)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((1, SIZE, SIZE, 3), np.float32), r"got float32: scale"),
        (np.full((1, SIZE, SIZE, 3), np.nan), r"got float64 with NaN or infinity"),
        (np.zeros((1, SIZE, SIZE + 1, 3), np.uint8), r"got \[1, 8, 9, 3\]"),
        (np.zeros((SIZE, SIZE), np.uint8), r"got \[8, 8\]"),
        (np.zeros((1, SIZE, SIZE, 4), np.uint8), r"got \[1, 8, 8, 4\]"),
    ],
)
def test_wrong_images(service, images, message):
    with pytest.raises(InvalidImageError, match=message):
        service.classify(images, "stripes")


def test_wrong_tasks_and_levels(service):
    images = stripes(2).images
    with pytest.raises(UnknownTaskError, match="no task 'faces'; registered: stripes"):
        service.classify(images, "faces")
    with pytest.raises(LevelError, match=r"there is no level 3; levels: -4, 0, 2"):
        service.classify(images, "stripes", 3)
    with pytest.raises(ElasticError, match="2 images need one task for all or one per image, got 1"):
        service.classify(images, ["stripes"])


def test_a_task_without_these_prompts(vit, registered, options, tmp_path):
    folder = shutil.copytree(registered, tmp_path / "tasks")
    found = Service.from_checkpoint(vit, repository=folder, **options)
    found.register_task("plain", stripes(), training=QUICK)
    with pytest.raises(LevelError, match="task 'plain' was not trained with 2 prompts; trained numbers: none"):
        found.classify(stripes(1).images, "plain", 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"merge_levels": (-9,)},
            "level -9 merges 9 tokens in each layer; of 17 tokens the first layer can merge",
        ),
        ({"merge_levels": (-4, 2)}, r"merge_levels must be < 0, got \[2\]"),
        ({"max_batch": 0}, "Service.max_batch must be an integer >= 1, below .*, got 0"),
        ({"prompt_mode": "keep"}, "Service.prompt_mode must be 'replace' or 'accumulate', got 'keep'"),
        ({"schedule": "fast"}, "Service.schedule must be 'constant' or 'decreasing' or None, got 'fast'"),
        ({"device_memory": "much"}, "device_memory must be bytes or a size"),
    ],
)
def test_wrong_options(vit, tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        Service.from_checkpoint(vit, repository=tmp_path, **given)


def test_other_models_are_refused(model_dir):
    with pytest.raises(ElasticError, match="is no vision transformer"):
        Service.from_checkpoint(model_dir)


def test_tasks_of_another_backbone_are_refused(registered, tmp_path, options):
    other = save_vit(tmp_path / "other", seed=1)
    found = Service.from_checkpoint(other, repository=registered, **options)
    with pytest.raises(ElasticError, match=r"'stripes' is not served: .* was trained with another model"):
        found.classify(stripes(1).images, "stripes")


def test_prompts_of_another_mode_are_refused(vit, registered, options):
    found = Service.from_checkpoint(vit, repository=registered, prompt_mode="accumulate", **options)
    with pytest.raises(ElasticError, match="trained with prompt_mode='replace'"):
        found.task("stripes")


def test_registering(empty, vit, options):
    dataset = stripes()
    with pytest.raises(UnknownTaskError, match="no task 'a'; registered: none"):
        empty.classify(dataset.images, "a")
    for name in ("", "../a", "a/b", ".hidden"):
        with pytest.raises(ElasticError, match="a task's name has letters"):
            empty.register_task(name, dataset)
    with pytest.raises(ElasticError, match="has 4 classes and max_classes=3"):
        empty.register_task("a", stripes(60, names=("a", "b", "c", "d")))
    with pytest.raises(LevelError, match=r"prompts must be a list of integers >= 1, got \[2, 0\]"):
        empty.register_task("a", dataset, prompts=[2, 0])
    with pytest.raises(InvalidImageError, match="images must be uint8"):
        empty.register_task("a", dataclasses.replace(dataset, images=dataset.images[:, :4]))
    assert empty.tasks == {}
    steps = []
    first = empty.register_task("a", dataset, prompts=[2], training=QUICK, progress=lambda *args: steps.append(args))
    assert (first.version, empty.levels) == (1, (-4, 0, 2))
    assert {what for what, _, _ in steps} == {
        "computing features",
        "fitting the head",
        "training 2 prompts",
        "choosing where levels merge",
        "compiling programs",
        "measuring accuracy",
        "timing batches",
    }
    with pytest.raises(TaskExistsError, match="task 'a' is registered; ask for a new version"):
        empty.register_task("a", dataset)
    second = empty.register_task("a", stripes(seed=2), training=QUICK, new_version=True)
    assert second.version == 2
    assert len(second.accuracy) == 2
    again = Service.from_checkpoint(vit, repository=empty._registrar.repository.folder, **options)
    assert again.task("a").version == 2
    image = dataset.images[0]
    np.testing.assert_array_equal(
        again.classify(image, "a")[0].probabilities, empty.classify(image, "a")[0].probabilities
    )


def test_what_a_task_was_not_trained_on_is_kept_with_it(vit, empty, monkeypatch):
    dataset, division, trained = stripes(80), Division(test_share=0.5, test_seed=2), []

    def counted(features, labels, *args, **options):
        trained.append(len(labels))
        return fit_head(features, labels, *args, **options)

    monkeypatch.setattr("jaxinfer.elastic.tasks.training.fit_head", counted)
    empty.register_task("a", dataset, division=division, training=QUICK)
    assert trained == [len(division.parts(dataset).training)]
    again = Service.from_checkpoint(vit, repository=empty._registrar.repository.folder, merge_levels=(-4,), max_batch=2)
    np.testing.assert_array_equal(again.task("a").divide(dataset).test.images, division.parts(dataset).test.images)
    validation = stripes(20, seed=9)
    with pytest.raises(ElasticError, match="give validation images, or a division of the data set, not both"):
        empty.register_task("b", dataset, division=division, validation=validation)
    unknown = empty.register_task("b", stripes(32), validation=validation, training=QUICK)
    with pytest.raises(ElasticError, match="task 'b': which images of its data set it was not trained on is not known"):
        unknown.divide(dataset)


def test_a_failure_while_registering_changes_nothing(empty, monkeypatch):
    empty.register_task("a", stripes(), training=QUICK)
    before = empty.classify(stripes(2).images, "a")

    def fail(task):
        raise OSError("the disk is full")

    monkeypatch.setattr(empty._registrar.repository, "write", fail)
    with pytest.raises(OSError, match="the disk is full"):
        empty.register_task("a", stripes(seed=4), training=QUICK, new_version=True)
    after = empty.classify(stripes(2).images, "a")
    assert empty.task("a").version == 1
    np.testing.assert_array_equal(before[0].probabilities, after[0].probabilities)


def test_memory_is_reserved_for_what_runs(vit, tmp_path, options, monkeypatch):
    gc.collect()  # what other tests have dropped would give its memory back in between
    with Service.from_checkpoint(vit, repository=tmp_path, max_waiting=7, **options) as service:
        programs = service._catalogue.programs
        tenants, image = service._catalogue.reservation.sizes, SIZE**2 * 3
        host = host_budget()
        assert tenants[host, "weights"] == sum(leaf.nbytes for leaf in load_model(vit).leaves.values())
        assert (tenants[host, "images that wait"], tenants[host, "images"]) == (7 * image, 2 * 2 * image)
        service.register_task("a", stripes(), training=QUICK)
        before = service._catalogue.reservation.sizes
        assert sum(before.values()) == programs.bytes_needed(2) + 7 * image
        assert before[host, "programs' workspace"] > 0
        monkeypatch.setattr(host, "capacity", host.reserved + 100)
        with pytest.raises(BudgetError, match=r"(?s)lower max_batch, .*\n  Service vit, weights: "):
            service.register_task("b", stripes(), prompts=[2], training=QUICK)
        assert service._catalogue.reservation.sizes == before
        assert service.levels == (-4, 0)
        monkeypatch.undo()
        monkeypatch.setattr(service._registrar.repository, "write", lambda task: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            service.register_task("b", stripes(), prompts=[2], training=QUICK)
        assert service._catalogue.reservation.sizes == before
        monkeypatch.undo()
        service.register_task("b", stripes(), prompts=[2], training=QUICK)
        after = service._catalogue.reservation.sizes
        assert after[host, "prompts and heads"] > before[host, "prompts and heads"]
        assert sum(after.values()) == programs.bytes_needed(2) + 7 * image


KILLED = """
import sys
from jaxinfer.elastic import Service, TrainingConfig
from tests.elastic.vits import stripes

service = Service.from_checkpoint(sys.argv[1], repository=sys.argv[2], merge_levels=(-4,), max_batch=2, max_tasks=2,
                                  max_classes=3, schedule="constant")
print("started", flush=True)
service.register_task("stripes", stripes(seed=8), prompts=[2], training=TrainingConfig(steps=10**6), new_version=True,
                      progress=lambda what, done, total: print(what, flush=True))
"""


@pytest.mark.slow
def test_killed_while_it_trains(vit, registered, options, tmp_path):
    """The version before goes on serving, and what the killed process left does no harm."""
    folder = shutil.copytree(registered, tmp_path / "tasks")
    (folder / "stripes" / ".v2.partial").mkdir()  # as if it had been writing
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(vit), str(folder)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "training 2 prompts":
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    found = Service.from_checkpoint(vit, repository=folder, **options)
    assert found.task("stripes").version == 1
    assert found.register_task("stripes", stripes(), training=QUICK, new_version=True).version == 2


def test_a_damaged_task_leaves_the_others_serving(vit, registered, options, tmp_path, caplog):
    folder = shutil.copytree(registered, tmp_path / "tasks")
    for name in ("cut", "without"):
        shutil.copytree(registered / "stripes", folder / name)
    (cut,), (without,) = ((folder / name / "v1").iterdir() for name in ("cut", "without"))
    cut.write_bytes(cut.read_bytes()[:-1])
    without.write_bytes(without.read_bytes().replace(b"rows", b"cows"))
    with Service.from_checkpoint(vit, repository=folder, **options) as found:
        assert (found.tasks.keys(), found.refused.keys()) == ({"stripes"}, {"cut", "without"})
        assert isinstance(found.refused["cut"], CheckpointError)
        assert "Task 'cut' is not served" in caplog.text
        with pytest.raises(ElasticError, match=r"task 'cut' is not served: .*checkpoint\.safetensors: has"):
            found.classify(stripes(1).images, "cut")
        found.measure_latency()
        assert found.submit(stripes(1).images[0], "stripes", deadline=60.0).result(60).label
        assert found.register_task("cut", stripes(), training=QUICK, new_version=True).version == 2
        assert found.refused.keys() == {"without"}
        assert found.classify(stripes(1).images, "cut")


def test_what_is_not_finite_is_refused(empty, vit, options):
    steep = TrainingConfig(steps=20, batch=8, learning_rate=1e30)
    with pytest.raises(ElasticError, match=r"'a': the .* trained for 1 prompts .* lower TrainingConfig.learning_rate"):
        empty.register_task("a", stripes(), prompts=[1], training=steep)
    assert empty.tasks == {}
    assert Service.from_checkpoint(vit, repository=empty._registrar.repository.folder, **options).tasks == {}
    with pytest.raises(ValueError, match=r"learning_rate must be a finite number > 0, got nan"):
        TrainingConfig(learning_rate=float("nan"))


def test_logits_that_are_not_finite_are_no_answer(vit, registered, options, monkeypatch):
    """And only those: other queries of their batch are answered."""
    with Service.from_checkpoint(vit, repository=registered, **options) as found:
        found.measure_latency()
        launch, (bad, good) = found._catalogue.programs.launch, stripes(2).images

        def overflow(level, tasks, images):
            launched = launch(level, tasks, images)
            places = np.flatnonzero((images == bad).all((1, 2, 3)))
            launched.batch.outputs = launched.batch.outputs.at[places, 1].set(np.nan)
            return launched

        monkeypatch.setattr(found._catalogue.programs, "launch", overflow)
        with pytest.raises(FailedError, match="the logits of an image are not finite"):
            found.classify([good, bad], "stripes")
        futures = [found.submit(image, "stripes", deadline=60.0) for image in (bad, good, good)]
        with pytest.raises(FailedError, match="the logits of an image are not finite"):
            futures[0].result(60)
        assert [future.result(60).in_time for future in futures[1:]] == [True, True]
        assert (found.stats().failed, found.stats().answered) == (1, 2)


def test_profiles(service):
    for level in service.levels:
        found = service.accuracy("stripes", level)
        assert found.images == 8  # a fifth of each class
        assert found.accuracy > 0.8
        assert 0 < found.standard_error < 0.2
    service.measure_latency()
    planned = [service.serving_profile().accuracy_at("stripes", level) for level in service.levels]
    assert planned == sorted(planned)
    with pytest.raises(ProfileError, match=r"batches of 64 at level 0 were never timed here"):
        service.latency.seconds(0, 64)


def test_a_profile_of_something_else_is_stale(vit, registered, options):
    changed = Service.from_checkpoint(vit, repository=registered, **{**options, "schedule": "decreasing"})
    assert changed.accuracy("stripes", 0).accuracy > 0.8
    with pytest.raises(
        ProfileError, match=r"was not profiled at level -4 with its present settings, .*\(8, 0\).* Profiled: .*\(4, 4\)"
    ):
        changed.accuracy("stripes", -4)
    more = Service.from_checkpoint(vit, repository=registered, **{**options, "merge_levels": (-3,)})
    with pytest.raises(ProfileError, match="was not profiled at level -3"):
        more.accuracy("stripes", -3)


def test_validation_images_are_of_classes_by_name(vit, registered, options, tmp_path):
    """In another order, and where one is missing, as a folder of images has them."""
    found = Service.from_checkpoint(vit, repository=shutil.copytree(registered, tmp_path / "tasks"), **options)
    given = stripes(seed=4)
    swapped = Dataset(given.images, 1 - given.labels, given.names[::-1])
    alone = swapped.take(np.flatnonzero(swapped.labels == 0))
    for validation in (swapped, dataclasses.replace(alone, names=alone.names[:1])):
        found.profile("stripes", validation)
        assert found.accuracy("stripes", 0).accuracy > 0.8
    with pytest.raises(InvalidImageError, match="images of the class 'dots'; known classes: rows, columns"):
        found.profile("stripes", dataclasses.replace(given, names=("rows", "dots")))
    task = found.register_task("other", given.take(np.arange(32)), validation=swapped, training=QUICK)
    assert found.accuracy(task.name, 0).accuracy > 0.8


def test_schedules_are_chosen_by_profiling(vit, tmp_path, options):
    given = {**options, "schedule": None, "merge_levels": (-6,), "max_batch": 1}
    made = Service.from_checkpoint(vit, repository=tmp_path / "tasks", **given)
    made.register_task("a", stripes(), training=QUICK)
    assert made.adaptation(-6).merges in ((6, 6), (12, 0))
    again = Service.from_checkpoint(vit, repository=tmp_path / "tasks", **given)
    assert again.adaptation(-6) == made.adaptation(-6)
    profiled = again.profile("a", stripes(30, seed=4))
    assert profiled.version == 2
    assert again.accuracy("a", -6).images == 30


class Chosen:
    """In place of a function. It is none itself, so programs are kept for the services that are opened next."""

    def __init__(self, schedule):
        self.schedule = schedule

    def __call__(self, *_):
        return self.schedule


@pytest.fixture
def two_tasks(vit, tmp_path, options):
    """How to open a repository with two tasks, whose merging level was chosen to be constant."""

    def opened(**changed):
        given = {**options, "schedule": None, "merge_levels": (-6,), "max_tasks": 3, "max_batch": 1} | changed
        return Service.from_checkpoint(vit, repository=tmp_path / "tasks", **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxinfer.elastic.profiling._choose_schedule", Chosen(MergeSchedule.CONSTANT))
        made = opened()
        for seed, name in enumerate("ab"):
            made.register_task(name, stripes(seed=seed), training=QUICK)
    return opened


def check_all_are_served(service, names):
    service.measure_latency()
    profile = service.serving_profile()
    assert (profile.levels, profile.tasks) == ((-6, 0), tuple(names))
    assert service.adaptation(-6).merges == (6, 6)


@pytest.fixture
def chooses_otherwise(monkeypatch):
    """Whatever is timed now, what is decreasing wins."""
    monkeypatch.setattr("jaxinfer.elastic.profiling._choose_schedule", Chosen(MergeSchedule.DECREASING))


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{}, {"schedule": "decreasing"}])
def test_profiling_a_task_leaves_the_others_as_they_were(two_tasks, chooses_otherwise, changed):
    assert two_tasks(**changed).profile("a", stripes(30, seed=4)).version == 2
    check_all_are_served(two_tasks(), "ab")


def test_profiling_or_registering_a_task_leaves_the_others_as_they_were(two_tasks, chooses_otherwise, monkeypatch):
    """Also a process that ends before the task is there."""
    registering = two_tasks(merge_levels=(-6, -2))

    def ends(task):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(registering._registrar.repository, "write", ends)
        with pytest.raises(KeyboardInterrupt):
            registering.register_task("c", stripes(), training=QUICK)
    assert registering.tasks.keys() == {"a", "b"}
    assert registering.adaptation(-2).merges == (2, 2)
    check_all_are_served(two_tasks(), "ab")
    registering.register_task("c", stripes(), training=QUICK)
    assert registering.adaptation(-2).merges == (4, 0)
    check_all_are_served(two_tasks(), "abc")
    assert two_tasks(merge_levels=(-2,)).profile("a", stripes(30, seed=4)).version == 2
    check_all_are_served(two_tasks(), "abc")


def test_accuracies_of_other_formats_are_kept(vit, registered, options, tmp_path):
    folder = shutil.copytree(registered, tmp_path / "tasks")
    half = Service.from_checkpoint(vit, repository=folder, dtype="bfloat16", **options | {"max_batch": 1})
    with pytest.raises(ProfileError, match=r"in bfloat16: call `profile` .* Profiled: .* in float32"):
        half.accuracy("stripes", 0)
    half.profile("stripes", stripes(30, seed=4))
    whole = Service.from_checkpoint(vit, repository=folder, **options)
    assert (half.accuracy("stripes", -4).images, whole.accuracy("stripes", -4).images) == (30, 8)


@pytest.fixture
def latency(tmp_path, monkeypatch):
    """Of a device of which batches of 1 and 2 were measured at two levels; made again, it reads what is kept."""
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))

    def made():
        return LatencyProfile(Costs.open(device="a device", model={}), lambda level: 0)

    first = made()
    for level in (-4, 0):
        for batch in (1, 2):
            first.renew(level, batch, [0.010 * batch] * 40)
    first.costs.save()
    return made


def observe(latency, level, batch, seconds):
    return sum(latency.observe(level, batch, seconds) for _ in range(NEWEST))


def test_latency_follows_the_machine(latency):
    found = latency()
    assert found.seconds(0, 1).p50 == pytest.approx(0.010, rel=0.03)  # times are kept in steps of 5%
    assert observe(found, 0, 1, 0.012) == 0
    assert observe(found, 0, 1, 0.500) == found.refreshed == 1
    assert found.seconds(0, 1) == pytest.approx((0.500, 0.500))
    assert observe(found, 0, 1, 0.001) == 1
    assert found.seconds(0, 1) == pytest.approx((0.001, 0.001))


def test_a_slowdown_is_forgotten_when_it_is_over(latency):
    """Of all levels and sizes, though only one was seen to be quick again: the others would not be chosen."""
    found, wanted = latency(), latency()
    observe(found, -4, 1, 0.002)  # quicker than measured, slowdown or not
    for level, batch in ((0, 1), (0, 2), (-4, 2)):
        assert observe(found, level, batch, 0.1 * batch) == 1
    assert observe(found, 0, 1, 0.010) == 1
    assert found.seconds(-4, 1).p50 == pytest.approx(0.002)
    for level, batch in ((0, 1), (0, 2), (-4, 2)):
        assert found.seconds(level, batch) == wanted.seconds(level, batch)


def test_later_processes_go_by_what_was_measured(latency):
    slow, wanted = latency(), latency().seconds(0, 1)
    for _ in range(20):
        observe(slow, 0, 1, 0.100)
    slow.costs.save()
    assert latency().seconds(0, 1) == wanted


def test_latency_measured_anew_takes_the_place_of_what_was(service):
    service.measure_latency()
    service.latency.renew(0, 1, [100.0] * 5)
    assert service.latency.seconds(0, 1).p95 == pytest.approx(100.0, rel=0.03)
    assert service.measure_latency() == {}
    found = service.measure_latency([0], remeasure=True, repeats=7)
    assert {key: len(seconds) for key, seconds in found.items()} == {(0, 1): 7, (0, 2): 7}
    least, most = found[0, 1].min() / 1.05, found[0, 1].max() * 1.05
    assert least < service.latency.seconds(0, 1).p50 <= service.latency.seconds(0, 1).p95 < most
    with pytest.raises(ElasticError, match=r"repeats must be an integer >= 5, as fewer .*, got 4"):
        service.measure_latency(repeats=4)


def test_batches_fit_into_device_memory(vit, registered, options):
    whole = Service.from_checkpoint(vit, repository=registered, **options)
    whole.compile_ahead()
    programs = whole._catalogue.programs
    needed = programs.bytes_needed
    assert needed(2) > needed(1)
    batch = max(level.forward.workspace_bytes(2) for level in programs._levels.values())
    weights = sum(leaf.nbytes for leaf in load_model(vit).leaves.values())
    assert needed(2) > weights + 2 * batch  # one runs while the next one is sent
    small = Service.from_checkpoint(vit, repository=registered, device_memory=needed(2) - 1, **options)
    assert small.batch_sizes == (1, 2)  # as long as no program is compiled
    small.measure_latency()
    assert small.batch_sizes == (1,)
    assert len(small.classify(stripes(5).images, "stripes")) == 5
    tiny = Service.from_checkpoint(vit, repository=registered, device_memory=str(needed(1) - 1), **options)
    with pytest.raises(ElasticError, match=r"is too little for batches of 1, which need .* at the levels -4, 0, 2"):
        tiny.compile_ahead()
    with pytest.raises(ElasticError, match=r"device_memory=1.0 kB is too little for batches of 1"):
        Service.from_checkpoint(vit, repository=registered, device_memory=1000, **options)


def test_images_that_wait_are_bounded(vit, registered, options, monkeypatch):
    """By number, and where images are large by bytes."""
    released = threading.Event()

    class Held(FixedLevel):
        def choose(self, batches, start, rate):
            assert released.wait(30)
            return super().choose(batches, start, rate)

    opened = functools.partial(Service.from_checkpoint, vit, repository=registered, **options)
    assert opened()._planning._max_waiting == 10_000
    assert opened(max_waiting=7)._planning._max_waiting == 7
    monkeypatch.setattr("jaxinfer.serving.budget.WAITING_BYTES", 2 * SIZE**2 * 3)
    with opened(policy=lambda profile: Held(profile, 0)) as found:
        found.measure_latency()
        image = stripes(1).images[0]
        futures = [found.submit(image, "stripes", deadline=60.0) for _ in range(2)]
        with pytest.raises(OverloadedError, match="2 requests are in flight already"):
            found.submit(image, "stripes", deadline=60.0)
        released.set()
        assert [future.result(60).in_time for future in futures] == [True, True]


def test_a_process_with_too_many_memory_mappings_compiles_no_more(vit, registered, options, monkeypatch, tmp_path):
    (tmp_path / "limit").write_text("100\n")
    monkeypatch.setattr("jaxinfer.compiled.mappings._LIMIT", tmp_path / "limit")
    monkeypatch.setattr("jaxinfer.compiled.mappings._sure", 0)
    service, image = Service.from_checkpoint(vit, repository=registered, **options), stripes(1).images
    with pytest.raises(RuntimeError, match=r"memory mappings, and Linux ends it at 100 \(vm.max_map_count\)"):
        service.classify(image, "stripes")
    monkeypatch.setattr("jaxinfer.compiled.mappings._LIMIT", tmp_path / "missing")
    assert service.classify(image, "stripes")


def test_a_task_whose_prompts_do_not_fit_into_device_memory(empty, vit, options, tmp_path):
    empty.register_task("a", stripes(), training=QUICK)
    exact = options | {"device_memory": empty._catalogue.programs.bytes_needed(2) + 100}
    with Service.from_checkpoint(vit, repository=tmp_path / "tasks", **exact) as service:
        service.measure_latency()
        service.submit(stripes(1).images[0], "a", deadline=60.0).result()
        with pytest.raises(ElasticError, match="is too little for batches of 2"):
            service.register_task("b", stripes(), prompts=[2], training=QUICK)
        assert service.levels == (-4, 0)
        assert service.register_task("b", stripes(), training=QUICK).version == 1


def test_threads_classify_while_a_task_is_registered(empty):
    empty.register_task("a", stripes(), training=QUICK)
    image, ended, answers = stripes(1, seed=6).images, threading.Event(), []
    wanted = empty.classify(image, "a")[0].probabilities

    def classify():
        while not ended.is_set():
            answers.append(empty.classify(image, "a")[0].probabilities)
            time.sleep(1e-3)

    threads = [threading.Thread(target=classify) for _ in range(3)]
    for thread in threads:
        thread.start()
    empty.register_task("b", stripes(seed=3), training=QUICK)
    ended.set()
    for thread in threads:
        thread.join()
    assert len(answers) > 3
    for found in answers:
        np.testing.assert_array_equal(found, wanted)


def test_it_is_found_from_the_top():
    assert jaxinfer.elastic.Service is Service


class OneByOne:
    """A device that takes 20 ms for each batch, one after the other, in place of a service's own."""

    def __init__(self, service, monkeypatch, seconds=0.020):
        self.seconds, self._free, self._lock = seconds, 0.0, threading.Lock()
        self._classes = max(len(task.labels) for task in service.tasks.values())
        monkeypatch.setattr(service._catalogue.programs, "_launch", self._launch)

    def _launch(self, served, level, places, images):
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + self.seconds
            return _Pending(self._free, np.zeros((len(images), self._classes), np.float32))


class _Pending:
    def __init__(self, ends, logits):
        self._ends, self._logits = ends, logits

    def result(self):
        time.sleep(max(self._ends - time.perf_counter(), 0))
        return self._logits


@pytest.fixture
def busy(vit, registered, options, monkeypatch):
    """A service on a device that six threads keep busy with what they classify."""
    service = Service.from_checkpoint(vit, repository=registered, **options)
    service.measure_latency()
    device, image, ended = OneByOne(service, monkeypatch), stripes(1).images, threading.Event()

    def classify():
        while not ended.is_set():
            service.classify(image, "stripes")

    threads = [threading.Thread(target=classify) for _ in range(6)]
    for thread in threads:
        thread.start()
    yield service, device
    ended.set()
    for thread in threads:
        thread.join()
    service.close(drain=False)


def test_batches_are_timed_alone_while_others_classify(busy):
    service, device = busy
    for seconds in service.measure_latency([0], remeasure=True).values():
        assert np.median(seconds) < 2 * device.seconds
    assert service.latency.seconds(0, 1).p50 < 2 * device.seconds


def test_queries_are_timed_alone_while_others_classify(busy):
    """So that the planner does not take a queue for a slow device."""
    service, device = busy
    for level in service.levels:
        for size in service.batch_sizes:
            service.latency.renew(level, size, [device.seconds] * 5)
    for _ in range(2 * NEWEST):
        service.submit(stripes(1).images[0], "stripes", deadline=60.0).result(60)
    for level in service.levels:
        assert service.latency.seconds(level, 1).p50 < 2 * device.seconds


def test_a_query_that_its_caller_ends_harms_no_other(busy):
    """Some while they wait, and some while they run."""
    service, _ = busy
    queries = [service.submit(stripes(1).images[0], "stripes", deadline=60.0) for _ in range(30)]
    for query in queries[::2]:
        with contextlib.suppress(InvalidStateError):
            query.set_result(None)
    assert all(query.result(60).label for query in queries[1::2])
    assert service.submit(stripes(1).images[0], "stripes", deadline=60.0).result(60).label
