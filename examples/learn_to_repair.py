"""A small model learns to read Python's error messages and to repair its code, in real sandboxes, on a laptop.

    make demo                          # or: python examples/learn_to_repair.py --seed 0
    make demo PROFILE=smoke            # a short run that checks that every part works
    make demo PROFILE=blind            # the ablation: the same run, but the model never sees what a program printed

The tasks are one-line functions (``palaestra.envs.suites.code.repair_lines``). Some hide what only the error message
tells: the name of a helper that was renamed, the order of the operands, a divisor that may be 0. First an imperfect
demonstrator plays 3,000 episodes and a decoder of 0.2 million parameters is warmed up on them; then it learns from its
own episodes alone, three turns each, every program executed in a cell of its own. Names of the held-out tasks never
occur in training. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flax import nnx

from palaestra.envs.async_env import AsyncAgentEnv
from palaestra.envs.errors import PalaestraError, SandboxUnavailable, UsageError
from palaestra.envs.sandboxes import SandboxPool, SandboxSpec, open_pool
from palaestra.envs.suites.code.repair_lines import STANDARD_KINDS, TURNS, Kind, repair_line, repair_lines
from palaestra.envs.suites.code.repair_lines_agents import Habits, demonstrated_program
from palaestra.envs.tasks.task_set import TaskSet
from palaestra.learners.batching import PackingShape
from palaestra.learners.config import LearnerConfig, OptimizerConfig
from palaestra.learners.learner import Learner
from palaestra.learners.models.config import DecoderConfig
from palaestra.learners.models.decoder import Decoder
from palaestra.learners.models.hf import save_folder
from palaestra.recipes.checks import require_learning, require_no_children
from palaestra.recipes.demonstrations import Demonstration, collect_demonstrations, demonstration_row
from palaestra.recipes.evaluation import Evaluation, evaluate
from palaestra.recipes.policy_gradient import PolicyGradient, PolicyGradientConfig
from palaestra.recipes.progress import RunProgress
from palaestra.recipes.run_folder import CurvePoint, RunFolder
from palaestra.recipes.sampling import KindSampler
from palaestra.recipes.supervised import train_supervised
from palaestra.recipes.transcripts import as_record, as_text, telling_pair
from palaestra.rollout.chat import PLAIN_SPECIALS, ChatFormat
from palaestra.rollout.engines.continuous_batching import EngineShapes
from palaestra.rollout.engines.jax_engine import JaxEngine
from palaestra.rollout.episode import EpisodeOptions
from palaestra.rollout.scheduler import Group, Scheduler, SchedulerLimits
from palaestra.rollout.tokenizer import Tokenizer, train_word_tokenizer
from palaestra.rollout.weights import WeightProbe, push

# A verb, "_noun", a digit and a quote are always pieces of their own, so that a name is the same two ids in a prompt,
# in a program and in a message: that is what makes copying it learnable for so small a model.
PIECES = (
    r"def |# |:return |[a-z]+(?=_)|_[a-z]+|[0-9]|\([a-z](?:,[a-z])?\)|[-+*/%]+|[A-Z][A-Za-z]+Error: "
    r"|\. Did you mean: '| ?[A-Za-z][A-Za-z: -]*|.|\n"
)
PROMPT_TOKENS, ACTION_TOKENS, OBSERVATION_TOKENS = 13, 18, 18
CONTEXT_TOKENS = PROMPT_TOKENS + TURNS * ACTION_TOKENS + (TURNS - 1) * (OBSERVATION_TOKENS + 2)
WARM_START_TOKENS = int(0.95 * 16 * CONTEXT_TOKENS)
"""Of one supervised step: two chunks of eight rows, nearly full."""
JUDGED_FROM = 1000
"""First of the held-out tasks that runs are judged on: others than those that the settings were chosen on (0 to 63)."""
EPISODES = 192
"""Under way at once: a whole batch."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One profile. The defaults are the validated ones."""

    kinds: tuple[Kind, ...] = STANDARD_KINDS
    demonstrations: int = 3000
    warm_start_steps: int = 250
    updates: int = 70
    groups_per_update: int = 24
    group_size: int = 8
    max_extra_groups: int = 8
    """Drawn in place of groups in which every episode came out the same."""
    hardness: float = 0.7
    """How much less often kinds are drawn that the policy already solves."""
    entropy_coefficient: float = 0.005
    evaluation_tasks_per_kind: int = 64
    evaluate_every: int = 20
    evaluation_tasks_between: int = 192
    blind: bool = False
    """Blank every observation that the model sees; demonstrator, tasks and rewards stay as they are."""


PROFILES: dict[str, Settings] = {
    "full": Settings(),
    "blind": Settings(blind=True),
    "smoke": Settings(
        kinds=("op", "order", "guard"),
        demonstrations=600,
        warm_start_steps=110,
        updates=5,
        groups_per_update=12,
        max_extra_groups=0,
        evaluation_tasks_per_kind=16,
        evaluate_every=100,
    ),
}

PHASES = {
    "demonstrations": 0.08,
    "warm start": 0.06,
    "compile": 0.04,
    "evaluation before": 0.03,
    "reinforcement": 0.76,
    "evaluation after": 0.03,
}
"""Shares of the time, for the estimate of what is left."""


class Demo:
    """The run: each method is one phase, in the order in which ``run`` calls them."""

    def __init__(self, settings: Settings, seed: int, folder: RunFolder, progress: RunProgress) -> None:
        self.settings, self.seed, self.folder, self.progress = settings, seed, folder, progress
        kinds = settings.kinds
        self.train_tasks = repair_lines("train", kinds=kinds, seeds=range(10_000))
        judged = range(JUDGED_FROM, JUDGED_FROM + settings.evaluation_tasks_per_kind)
        self.held_out = repair_lines("held_out", kinds=kinds, seeds=judged)
        self.sandbox_steps = 0
        self.curve: list[CurvePoint] = []
        self.rewards: list[float] = []
        self.weights = ("", "")
        """Fingerprints before and after reinforcement."""

    async def run(self, pool: SandboxPool) -> dict[str, float | int]:
        """Everything; returns the summary."""
        demonstrations = await self._demonstrate(pool)
        chat = self._chat(demonstrations)
        learner = await self._warm_start(demonstrations, chat)
        engine = await self._start_engine(learner.model(), learner.version)
        try:
            scheduler = Scheduler(
                engine,
                chat,
                self._env_factory(pool, self.train_tasks),
                EpisodeOptions(max_action_tokens=ACTION_TOKENS, max_context_tokens=CONTEXT_TOKENS),
                SchedulerLimits(max_episodes=EPISODES),
            )
            judge = replace(scheduler, make_env=self._env_factory(pool, self.held_out))
            self.progress.phase("evaluation before", 2 * len(self.held_out))
            before = await self._evaluate(judge, 0, len(self.held_out), shown=1)
            learner = self._reinforcer(learner)
            warm = learner.fingerprint()
            await self._reinforce(learner, scheduler, judge)
            self.weights = (warm, learner.fingerprint())
            self.progress.phase("evaluation after", 2 * len(self.held_out))
            after = await self._evaluate(judge, self.settings.updates, len(self.held_out), shown=1)
        finally:
            await engine.close()
        save_folder(
            learner.model(), self.folder.path / "model", files={"tokenizer.json": chat.tokenizer.as_json().encode()}
        )
        self._show_an_episode(before[0], after[0])
        return {
            "pass_before": round(before[0].pass_rate, 4),
            "pass_after": round(after[0].pass_rate, 4),
            "greedy_after": round(after[1].pass_rate, 4),
            "turn1_after": round(after[0].passed_by_turn(1), 4),
            "seconds": round(self.progress.elapsed_s, 1),
            "sandbox_steps": self.sandbox_steps,
            "seed": self.seed,
        }

    def _env_factory(self, pool: SandboxPool, tasks: TaskSet) -> Callable[[], AsyncAgentEnv]:
        """Environments for this demo: one program an action, one line of CPython's own words back."""
        return lambda: AsyncAgentEnv(
            tasks,
            sandboxes=pool,
            feedback="last_line",
            action_format="program",
            interpreter="fork",
            turn_penalty=0.1,
            step_s=1.0,
        )

    async def _demonstrate(self, pool: SandboxPool) -> list[Demonstration]:
        count = self.settings.demonstrations
        self.progress.phase("demonstrations", count)
        habits = Habits()
        sampler = KindSampler(self.train_tasks, seed=self.seed)
        passed = 0

        def on_episode(done: Demonstration) -> None:
            nonlocal passed
            passed += done.passed
            self.sandbox_steps += len(done.turns)
            self.progress.advance(sandbox_steps=self.sandbox_steps, demonstrator_passed=passed)

        return await collect_demonstrations(
            [sampler.draw() for _ in range(count)],
            lambda task_id, last, seen, rng: demonstrated_program(repair_line(task_id), last, seen, rng, habits),
            self._env_factory(pool, self.train_tasks),
            seed=self.seed,
            concurrency=16,
            on_episode=on_episode,
        )

    def _chat(self, demonstrations: list[Demonstration]) -> ChatFormat:
        corpus = [
            text for done in demonstrations for text in (done.instruction, *(t for turn in done.turns for t in turn))
        ]
        tokenizer = train_word_tokenizer(corpus, pattern=PIECES, vocab_size=384, special_tokens=PLAIN_SPECIALS)
        return ChatFormat.plain(
            tokenizer,
            max_prompt_tokens=PROMPT_TOKENS,
            max_observation_tokens=0 if self.settings.blind else OBSERVATION_TOKENS,
        )

    async def _warm_start(self, demonstrations: list[Demonstration], chat: ChatFormat) -> Learner:
        steps = self.settings.warm_start_steps
        self.progress.phase("warm start", steps)
        model = Decoder(_model_config(chat.tokenizer), nnx.Rngs(self.seed))
        optimizer = OptimizerConfig(
            3e-3, schedule="cosine", warmup_steps=30, total_steps=max(steps, 31), final_fraction=0.05, weight_decay=0.01
        )
        learner = Learner(model, LearnerConfig(optimizer, _SHAPE))
        rows = [demonstration_row(done, chat) for done in demonstrations]

        def on_step(step: int, metrics: dict[str, float]) -> None:
            self.folder.append("metrics.jsonl", {"phase": "warm start", **metrics})
            self.progress.advance(loss=metrics["loss"])

        await train_supervised(
            learner, rows, steps=steps, tokens_per_step=WARM_START_TOKENS, seed=self.seed, on_step=on_step
        )
        return learner

    async def _start_engine(self, model: Decoder, version: int) -> JaxEngine:
        self.progress.phase("compile", 1)
        engine = JaxEngine(model, shapes=_ENGINE_SHAPES, version=version)
        await engine.warm_up()
        return engine

    def _reinforcer(self, warm: Learner) -> Learner:
        """A learner with the warm weights and an optimizer of its own."""
        optimizer = OptimizerConfig(1.5e-3, warmup_steps=5)
        return Learner(
            warm.model(),
            LearnerConfig(optimizer, _SHAPE, entropy_coefficient=self.settings.entropy_coefficient),
            version=warm.version,
        )

    async def _reinforce(self, learner: Learner, scheduler: Scheduler, judge: Scheduler) -> None:
        settings = self.settings
        batch = settings.groups_per_update * settings.group_size
        self.progress.phase("reinforcement", settings.updates)
        sampler = KindSampler(self.train_tasks, seed=self.seed + 1, hardness=settings.hardness)
        prompt = scheduler.chat.opening(self.train_tasks.get(self.train_tasks.ids[0]).instruction)
        probe = WeightProbe(learner.model(), tuple(prompt))
        await push(learner.params(), learner.version, scheduler.engine, probe)
        loop = PolicyGradient(
            learner,
            scheduler,
            self.train_tasks,
            sampler,
            probe,
            PolicyGradientConfig(
                settings.groups_per_update,
                settings.group_size,
                max_extra_groups=settings.max_extra_groups,
                max_k3=1e-9,  # engine and learner run the same float32 model: they may differ by rounding only
            ),
            seed=self.seed,
        )
        for update in range(1, settings.updates + 1):
            started_s = self.progress.elapsed_s
            report = await loop.update(self._count_steps)
            took_s = self.progress.elapsed_s - started_s
            self.rewards.append(report.mean_reward)
            self.folder.append("metrics.jsonl", {"phase": "reinforcement", "seconds": took_s, **report.record()})
            self.progress.advance(
                pass_rate=report.pass_rate,
                reward=report.mean_reward,
                sampled_tokens_per_s=report.sampled_tokens / took_s,
                episodes_per_s=batch / took_s,
                sandbox_steps=self.sandbox_steps,
                k3=report.learner["k3"],
            )
            if update % settings.evaluate_every == 0 and update < settings.updates:
                await self._evaluate(judge, update, settings.evaluation_tasks_between)

    async def _evaluate(
        self, judge: Scheduler, update: int, tasks: int, *, shown: int = 0
    ) -> tuple[Evaluation, Evaluation]:
        """On the first ``tasks`` held-out tasks: one sample at temperature 1, and greedy.

        ``shown`` is what an episode adds to the progress of the current phase.
        """

        def on_group(group: Group) -> None:
            self._count_steps(group)
            self.progress.advance(shown, sandbox_steps=self.sandbox_steps)

        entries = [self.held_out.entry(task_id) for task_id in self.held_out.ids[:tasks]]
        found = []
        for temperature in (1.0, 0.0):
            evaluation = await evaluate(judge, entries, temperature=temperature, seed=7, on_group=on_group)
            record = {"phase": "evaluation", "update": update, "temperature": temperature, **evaluation.summary()}
            self.folder.append("metrics.jsonl", record)
            found.append(evaluation)
        sampled, greedy = found
        if failures := sampled.failures + greedy.failures:
            self.progress.log(
                f"{failures} episodes of this evaluation failed in the infrastructure and count in no rate"
            )
        self.curve.append(CurvePoint(update, sampled.pass_rate, greedy.pass_rate))
        self.folder.plot_curve(self.curve, self.rewards, title=f"Learning to repair code (seed {self.seed})")
        kinds = "  ".join(f"{kind} {rate:.2f}" for kind, rate in sampled.pass_rate_by_kind.items())
        self.progress.log(
            f"after {update:3d} updates: held-out pass rate {sampled.pass_rate:.3f}, greedy {greedy.pass_rate:.3f}, "
            f"first turn {sampled.passed_by_turn(1):.3f}  ({kinds})"
        )
        return sampled, greedy

    def _count_steps(self, group: Group) -> None:
        self.sandbox_steps += sum(turn.executed for result in group.results for turn in result.turns)

    def _show_an_episode(self, before: Evaluation, after: Evaluation) -> None:
        """One held-out task before and after, turn by turn."""
        for name, result in zip(("before", "after"), telling_pair(before.results, after.results), strict=True):
            self.progress.log(f"\nA held-out task {name} reinforcement: {as_text(result)}")
            self.folder.append("episodes.jsonl", {"when": name, **as_record(result)})


_SHAPE = PackingShape(rows_per_chunk=8, row_tokens=CONTEXT_TOKENS)
_ENGINE_SHAPES = EngineShapes(
    max_slots=EPISODES,
    max_tokens=CONTEXT_TOKENS,
    row_buckets=(16, 48, 96, EPISODES),
    prefill_width=24,  # an observation with its markers, and the last token of the action before it
)


def _model_config(tokenizer: Tokenizer) -> DecoderConfig:
    """0.2 million parameters. Of the special ids only the end of an action can be sampled."""
    return DecoderConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=192,
        rope_theta=10_000.0,
        max_position_embeddings=CONTEXT_TOKENS,
        embedding_init_std=0.1,
        zero_output_projections=True,
        suppressed_ids=tuple(i for name, i in tokenizer.specials.items() if name != "<eot>"),
    )


async def run(arguments: argparse.Namespace) -> dict[str, float | int]:
    settings = PROFILES[arguments.profile]
    folder = RunFolder.fresh(arguments.runs, f"learn-to-repair-{arguments.profile}-seed{arguments.seed}")
    folder.write_json("settings.json", {"profile": arguments.profile, "seed": arguments.seed, **asdict(settings)})
    spec = SandboxSpec(memory_mib=256, pids=8, file_mib=1, workspace_mib=4, inodes=200, cpu_s=2, output_kib=4)
    with RunProgress(PHASES) as progress:
        demo = Demo(settings, arguments.seed, folder, progress)
        async with await open_pool(spec, backend=arguments.backend, warm=32) as pool:
            summary = await demo.run(pool)
    require_learning(*demo.weights, demo.rewards)
    require_no_children()
    folder.write_json("summary.json", summary)
    print(f"run folder: {folder.path} (curve.png, metrics.jsonl, episodes.jsonl, model/)", file=sys.stderr)
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="full")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the run's folder is made")
    parser.add_argument("--backend", choices=["auto", "podman", "bubblewrap"], default="auto")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        summary = asyncio.run(run(arguments))
    except PalaestraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError | SandboxUnavailable) else 1
    except KeyboardInterrupt:
        print("interrupted: sandboxes and engine are closed; the run folder holds what was finished", file=sys.stderr)
        return 130
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
