"""Scores on tasks by lm-eval: its own digits, on any ranks, without a changed bit of the run."""

import json
import sys

import pytest

from conftest import ROOT, execute
from lockstep.reports.progress import score_lines

METRICS = {
    "multiple_choice": ["acc", "acc_norm"],
    "loglikelihood": ["acc"],
    "loglikelihood_rolling": ["byte_perplexity", "bits_per_byte"],
    "generate_until": ["exact_match"],
}
# A function of a task, as lm-eval's own tasks have some. It needs the package `evaluate`, not evaluate.py.
FUNCTION = """
import evaluate

def score(doc, results):
    assert evaluate.load and not hasattr(evaluate, "EvaluateConfig")
    if doc["fails"]:
        raise RuntimeError("the metric is broken")
    return {"acc": results[0][1]}
"""


def write_task(folder, kind, name="", options="", rows=24):
    """A YAML file of lm-eval, with documents out of our own sources."""
    name = name or kind
    lines = [line.strip() for line in (ROOT / "train.py").read_text().splitlines() if len(line.strip()) > 30]
    with open(folder / f"{name}.jsonl", "w") as file:
        for i in range(rows):
            at = 1 + i % 12  # the first contexts are longer than the model's, the later ones come twice
            choices = [lines[i % 12][at + 8 : at + 8 + n] for n in (6, 9, 12)] + [" ", " " * 7]
            row = {
                "text": lines[i][: 5 * at],
                "choices": choices,
                "label": i % 5,
                "target": choices[i % 5],
                "fails": i == rows - 1,
            }
            print(json.dumps(row), file=file)
    metrics = "".join(f"\n  - metric: {metric}" for metric in METRICS[kind])
    rolling = kind == "loglikelihood_rolling"
    choose = "\ndoc_to_choice: '{{choices}}'" * (kind == "multiple_choice")
    target = "label" if choose else "'{{text}}'" if rolling else "'{{target}}'"
    generate = "\ngeneration_kwargs: {until: ['e', '\\n'], max_gen_toks: 7}" * (kind == "generate_until" and not options)
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}\ntest_split: test\n"
        f"output_type: {kind}\ndoc_to_text: '{'' if rolling else '{{text}}'}'{choose}\ndoc_to_target: {target}\n"
        f"target_delimiter: ''{generate}\nmetric_list:{metrics}\n{options}"
    )
    return folder / f"{name}.yaml"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A task of each kind, as --tasks takes them."""
    folder = tmp_path_factory.mktemp("tasks")
    return ",".join(str(write_task(folder, kind)) for kind in METRICS)


def by_lm_eval(model, names):
    """The scores that lm-eval's class for Hugging Face models gives a model directory."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(str(model), dtype="float32", device="cpu", batch_size=4)
    loaded = TaskManager(include_defaults=False).load(names.split(","))
    found = evaluator.evaluate(model, loaded, bootstrap_iters=0)["results"]
    return {
        task: {
            f"{metric}": values[f"{metric},none"] for key in values if (metric := key.removesuffix(",none")) in METRICS[task]
        }
        for task, values in found.items()
    }


def test_the_digits_are_those_of_lm_eval(shared, tasks):
    """Also where a text is cut to the context of 16, is empty, or differs from another only in its last token."""
    checkpoint = shared.latest("plain")
    done = execute([sys.executable, "evaluate.py", checkpoint, f"--tasks={tasks}", "--dtype=float32"])
    assert done.stdout.splitlines()[1:] == score_lines(by_lm_eval(checkpoint, tasks))


@pytest.mark.parametrize("strategy", ["fsdp", "exact"])
def test_no_bit_of_a_run_changes(train, tasks, strategy):
    flags = dict(strategy=strategy, dropout=0.1, steps=4)
    train("without", ranks=3, **flags)
    train("with", ranks=3, tasks=tasks, tasks_every=3, **flags)
    assert train.files("with") == train.files("without")
    assert train.metrics("with", "loss") == train.metrics("without", "loss")
    scores = train.metrics("with", "tasks/multiple_choice/acc")
    assert [record["step"] for record in scores] == [3, 4]
    if strategy == "exact":
        train("alone", tasks=tasks, tasks_every=3, **flags)
        assert train.metrics("alone", "tasks/multiple_choice/acc") == scores


@pytest.mark.slow
def test_compiled_code_stays_as_it_is(train, tasks):
    flags = dict(compile="on", steps=4)
    train("without", **flags)
    train("with", tasks=tasks, tasks_every=1, **flags)
    assert train.files("with") == train.files("without")


def test_a_run_that_continues_has_no_scores_twice(train, tasks):
    few = ",".join(f"{task}:8" for task in tasks.split(","))
    flags = dict(tasks=few, tasks_every=4, steps=8)
    train.kill("run", 7, ranks=2, **flags)
    train("run", ranks=2, **flags)
    steps = [record["step"] for record in train.metrics("run", "tasks/loglikelihood/acc")]
    assert steps == [4, 8]
    train("later", steps=5)
    for _ in range(2):  # tasks of a complete run; the second time it has them
        train("later", steps=5, tasks=few.split(",")[1])
    assert len(train.metrics("later", "tasks/loglikelihood/acc")) == 1


def test_where_lm_eval_fails_the_run_goes_on(train, tmp_path):
    (tmp_path / "function.py").write_text(FUNCTION)
    task = write_task(tmp_path, "loglikelihood", "custom", "process_results: !function function.score\n")
    done = train("run", ranks=2, steps=3, tasks=task, tasks_every=2)
    assert done.stdout.count("no scores on tasks: lm-eval failed: the metric is broken") == 2
    assert train.state("run")["step"] == 3
    done = execute([sys.executable, "evaluate.py", train.latest("run"), f"--tasks={task}"], status=1)
    assert "lm-eval failed: the metric is broken" in done.stderr
    done = execute([sys.executable, "evaluate.py", train.latest("run"), f"--tasks={task}:8"])
    assert "custom  acc 0." in done.stdout


def test_each_task_may_have_its_own_limit(shared, tmp_path):
    """With 24 documents, of which the last one fails."""
    (tmp_path / "function.py").write_text(FUNCTION)
    failing = write_task(tmp_path, "loglikelihood", "custom", "process_results: !function function.score\n")
    other = write_task(tmp_path, "multiple_choice")
    evaluate = [sys.executable, "evaluate.py", shared.latest("plain"), "--dtype=float32"]
    (alone,) = execute([*evaluate, f"--tasks={other}"]).stdout.splitlines()[1:]
    done = execute([*evaluate, f"--tasks={other},{failing}:23"])
    assert done.stdout.splitlines()[1] == alone and "custom  acc " in done.stdout


def test_what_cannot_be_measured_is_refused_before_training(train, tmp_path, tasks):
    def refused(**more):
        error = train("refused", status=2, **more).stderr
        assert not (train.runs / "refused").exists() and error.count("\n") == 1
        return error

    long = write_task(tmp_path, "generate_until", "long", "generation_kwargs: {max_gen_toks: 99}\n")
    assert "max_gen_toks 99" in refused(tasks=long)
    (tmp_path / "broken.yaml").write_text("task: [")
    assert f"--tasks={tmp_path}/broken.yaml" in refused(tasks=tmp_path / "broken.yaml")
    assert "perhaps you meant hellaswag" in refused(tasks="helaswag")
    offline = refused(tasks="hellaswag", env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)})
    assert "error: --tasks=hellaswag: Couldn't reach 'Rowan/hellaswag' on the Hub" in offline
    assert f"{tmp_path} lacks its data; run this once with a network" in offline and "None" not in offline
    done = train.changed(
        "import extras.tasks\nextras.tasks.find_spec = lambda name: None", "refused", ranks=2, status=1, tasks=tasks
    )
    assert "-m pip install 'lm_eval>=0.4.12'" in done.stderr and not (train.runs / "refused").exists()
