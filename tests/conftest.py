"""A tiny seeded trio, its bundle, and bundles whose drafts follow a script. Everything real, nothing useful.

    fixture           scope     what it is
    tiny_trio         session   Qwen3 target, drafter, xPress and Markov refiners on disk; transformers' model
    stories           session   token sequences that transformers' greedy `generate` wrote, near-ties excluded
    tiny_bundle       session   the trio exported: the only place where three graphs are traced and checked
    tiny_fused_bundle session   the same with the graph of a whole cycle
    scripted_bundle   session   factory: a copy of it that drafts what a table says, other settings as asked
    trio_maker        session   writes other tiny trios
    re_export         test      `export`, which traces each graph once per session

A random model of ordinary scale repeats one token. This one has large weights and sharp attention, so that its
output depends on every earlier token and visits a third of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
import torch
from numpy.typing import NDArray

from xpress_export import names
from xpress_export.exporter import cycle, graphs
from xpress_export.exporter import export as export_module
from xpress_export.exporter.configs import DecoderConfig, DrafterConfig, RefinerConfig, RopeConfig
from xpress_export.exporter.export import Exported, ExportOptions, export
from xpress_export.exporter.formats import write_drafter, write_refiner
from xpress_export.exporter.modules import Drafter, Refiner
from xpress_export.manifest import (
    GRAPHS_FOLDER,
    TOKENIZER_FOLDER,
    DraftRecord,
    read_manifest,
    record_files,
    write_manifest,
)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it, and all it starts

HIDDEN, HEAD_DIM, VOCAB, BLOCK, RANK = 48, 16, 320, 8, 8
MAX_CONTEXT = 600  # beyond the runtime's first two cache capacities, 256 and 512 rows
MASK = VOCAB - 3  # like Qwen3's: a row of the embedding that is no token
TAPS = (1, 0)  # out of order on purpose
THETA = 1e4
NEAR_TIE = 1e-4  # of the spread of a row of logits; float32 differences between kernels are 100 times smaller
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Trio:
    """Folders of the checkpoints; the target as transformers has it and the drafter, both eager and float32."""

    target: Path
    drafter: Path
    refiner: Path
    markov: Path
    model: Any
    drafter_module: Drafter

    def options(self, **changes: Any) -> ExportOptions:
        """Export options of the xPress trio; `changes` replaces some."""
        sources = {"target": str(self.target), "drafter": str(self.drafter), "refiner": str(self.refiner)}
        return ExportOptions(**{**sources, "max_context": MAX_CONTEXT, "trained": False, **changes})


@dataclass(frozen=True)
class Story:
    """ids[start:] is what transformers wrote, greedily, after ids[:start]; so any longer prefix is a prompt too."""

    ids: list[int]
    start: int

    def expected(self, num_prompt: int, num_tokens: int) -> list[int]:
        """The greedy continuation of the first `num_prompt` tokens."""
        assert self.start <= num_prompt <= len(self.ids) - num_tokens
        return self.ids[num_prompt : num_prompt + num_tokens]

    def script(self, num_right: Sequence[int], refiner: bool = False) -> Script:
        """A drafter of this story, `num_right[p]` drafts of which are right after an anchor at position p."""
        return Script(self, num_right, refiner)


def randomize(module: torch.nn.Module, seed: int, std: float) -> None:
    """Fill every parameter: matrices of scale `std`, norms around one (queries sharper), biases small."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        norm = 3.0 if "q_norm" in name else 1.0
        is_norm = parameter.ndim == 1 and not name.endswith("bias")
        parameter.data = norm * (1 + 0.2 * noise) if is_norm else std * noise


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE with a ChatML template, a few tokens smaller than the vocabulary of the model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the target verifies what the drafter drafts and the refiner refines, in one block at a time "
    tokenizer.train_from_iterator([text * 4], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    wrapped.chat_template = CHATML
    wrapped.save_pretrained(folder)


def write_target(folder: Path, **changes: Any) -> Any:
    """A Qwen3 target with tokenizer in `folder`; returns transformers' model. `changes` are config keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **{
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCAB,
            "max_position_embeddings": 640,
            "rope_theta": THETA,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
            **changes,
        }
    )
    model = Qwen3ForCausalLM(config).eval()
    randomize(model, seed=0, std=0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


class TrioMaker:
    """Writes tiny checkpoints that fit each other."""

    @staticmethod
    def target(folder: Path, **changes: Any) -> Any:
        """A target with its tokenizer; returns transformers' model. changes: keys of the config."""
        return write_target(folder, **changes)

    @staticmethod
    def drafter_config(decoder: Mapping[str, Any] | None = None, **changes: Any) -> DrafterConfig:
        """Layer 0 slides (causal inside the block, a window of 24), layer 1 is full and bidirectional."""
        body = DecoderConfig(
            family="qwen3",
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=HEAD_DIM,
            vocab_size=VOCAB,
            rms_norm_eps=1e-6,
            rope=RopeConfig(inv_freq=tuple(THETA ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2))),
            max_positions=640,
            tied_head=False,
            qk_norm=True,
            layer_windows=(24, None),
        )
        config = DrafterConfig(
            decoder=dataclasses.replace(body, **(decoder or {})),
            block_size=BLOCK,
            mask_token_id=MASK,
            target_layer_ids=TAPS,
            target_hidden_size=HIDDEN,
            first_slot=1,
            causal_layers=(True, False),
            num_target_layers=3,
        )
        return dataclasses.replace(config, **changes)

    @staticmethod
    def drafter(folder: Path, config: DrafterConfig, target: Any, d2t: torch.Tensor | None = None) -> Drafter:
        """A drafter folder; returns the eager module, which borrows embedding and head of `target`.

        d2t: int64 [Vd], target id minus draft id of a reduced vocabulary, whose head is rows of the target's.
        """
        module = Drafter(config).eval()
        randomize(module, seed=1, std=0.2)
        head = target.lm_head.weight.data
        if d2t is not None:
            module.vocab.target_ids = d2t + torch.arange(len(d2t))
            head = head[module.vocab.target_ids]
        module.embed_tokens.weight.data, module.lm_head.weight.data = target.model.embed_tokens.weight.data, head
        borrowed = {"embed_tokens.weight", "lm_head.weight", "vocab.target_ids"}
        tensors = {name: t for name, t in module.state_dict().items() if name not in borrowed}
        tensors |= {} if d2t is None else {"d2t": d2t}
        write_drafter(folder, config, tensors, {"rope_theta": THETA, "rope_type": "default"})
        return module

    @staticmethod
    def refiner(folder: Path, kind: str, first_slot: int = 1, draft_vocab_size: int = VOCAB) -> None:
        """A refiner folder, with weights so large that the head often overrules the drafter."""
        config = RefinerConfig(
            kind=kind,
            rank=RANK,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            draft_vocab_size=draft_vocab_size,
            block_size=BLOCK,
            num_passes=3,
            mlp_hidden=2 * RANK,
        )
        module = Refiner(config, first_slot)
        randomize(module, seed=2, std=0.4)
        tensors = {name: t for name, t in module.state_dict().items() if name != "vocab.target_ids"}
        write_refiner(folder, config, tensors, first_slot)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tensors of a tiny model are too small to share out: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def trio_maker() -> TrioMaker:
    """Writer of other tiny trios."""
    return TrioMaker()


@pytest.fixture(scope="session")
def tiny_trio(trio_maker: TrioMaker, tmp_path_factory: pytest.TempPathFactory) -> Trio:
    """The checkpoints on disk."""
    root = tmp_path_factory.mktemp("trio")
    model = trio_maker.target(root / "target")
    for kind in ("xpress", "markov"):
        trio_maker.refiner(root / kind, kind)
    return Trio(
        target=root / "target",
        model=model,
        drafter=root / "drafter",
        drafter_module=trio_maker.drafter(root / "drafter", trio_maker.drafter_config(), model),
        refiner=root / "xpress",
        markov=root / "markov",
    )


@pytest.fixture(scope="session")
def stories(tiny_trio: Trio) -> list[Story]:
    """One as long as the context, from one token; others from prompts of 3, 8 and 20 random tokens."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for num_prompt, num_tokens in ((1, MAX_CONTEXT - 1), (3, 100), (8, 100), (20, 100)):
        story = None
        while story is None:
            prompt = torch.randint(0, VOCAB, (num_prompt,), generator=generator).tolist()
            story = write_story(tiny_trio.model, prompt, num_tokens)
        found.append(story)
    return found


def write_story(model: Any, prompt: list[int], num_tokens: int) -> Story | None:
    """Transformers' greedy continuation of `prompt`, or None if it hangs on a near-tie or repeats itself."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits, ids = torch.cat(out.logits), out.sequences[0].tolist()
    best = logits.topk(2).values
    near_tie = ((best[:, 0] - best[:, 1]) / logits.std(-1)).min() < NEAR_TIE
    varied = len(set(ids)) > 0.25 * min(len(ids), VOCAB)
    return Story(ids, len(prompt)) if varied and not near_tie else None


class TraceOnce:
    """Stands in for the export's trace functions: the same request is traced once per session."""

    def __init__(self) -> None:
        self._traced: dict[str, Any] = {}
        self.num_traces = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put it in place of `graphs.trace_*` as the export stage sees them."""
        for name in ("trace_target", "trace_drafter", "trace_refiner", "trace_accept"):
            module = cycle if name == "trace_accept" else export_module
            patch.setattr(module, name, functools.partial(self._trace, name, getattr(graphs, name)))

    def _trace(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        key = f"{name} {args} {options}"
        if key not in self._traced:
            self.num_traces += 1
            self._traced[key] = function(*args, **options)
        return self._traced[key].clone()


@pytest.fixture(scope="session")
def trace_once() -> TraceOnce:
    """Tracing takes seconds; tests that export the same models again do not repeat it."""
    return TraceOnce()


@pytest.fixture
def re_export(trace_once: TraceOnce, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Exported]:
    """`export`, without tracing again what this session has traced."""
    trace_once.install(monkeypatch)
    return export


@pytest.fixture(scope="session")
def tiny_bundle(tiny_trio: Trio, trace_once: TraceOnce, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trio exported in float32. Read-only: copy it to change it."""
    out = tmp_path_factory.mktemp("bundles") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        trace_once.install(patch)
        export(tiny_trio.options(), out)
    return out


@pytest.fixture(scope="session")
def tiny_fused_bundle(tiny_trio: Trio, trace_once: TraceOnce, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in the fused layout."""
    out = tmp_path_factory.mktemp("bundles") / "fused"
    with pytest.MonkeyPatch.context() as patch:
        trace_once.install(patch)
        export(tiny_trio.options(layout=names.LAYOUT_FUSED), out)
    return out


@dataclass(frozen=True)
class Script:
    """What to draft while `story` is being told: `num_right[p]` right tokens, then wrong ones, after an anchor at p.

    refiner: replace the refiner by a table of the story in which a token is told by the two before it.
    """

    story: Story
    num_right: Sequence[int]
    refiner: bool = False

    def table(self) -> NDArray[np.int64]:
        """int64 [positions, BLOCK]: the tokens after the anchor, a row for each position of it."""
        ids = self.story.ids + [0] * BLOCK
        after = range(1, BLOCK + 1)
        rows = [[(ids[p + j] + (j > right)) % VOCAB for j in after] for p, right in enumerate(self.num_right)]
        return np.array(rows, np.int64)

    def follows(self) -> NDArray[np.int64]:
        """int64 [V * V]: the token after each pair of tokens, 0 after a pair the story does not have."""
        table = np.zeros((VOCAB, VOCAB), np.int64)
        table[self.story.ids[:-2], self.story.ids[1:-1]] = self.story.ids[2:]
        return table.reshape(-1)


_DRAFTER = f"""
script (int64[B] {names.WRITE_INDEX}, int64[B] {names.NUM_COMMITTED}, int64[B, N] {names.BLOCK_IDS})
    => (int64[B, M] {names.DRAFT_TOKENS}, float[B, M, {VOCAB}] {names.DRAFT_LOGITS})
<int64[1] zero = {{0}}, int64[1] axis = {{1}}, int64 depth = {{{VOCAB}}}, float[2] off_on = {{0, 1000}}>
{{
    position = Add({names.WRITE_INDEX}, {names.NUM_COMMITTED})
    rows = Gather(script_table, position)
    num_slots = Shape<start = 1, end = 2>({names.BLOCK_IDS})
    num_drafts = Sub(num_slots, script_first_slot)
    {names.DRAFT_TOKENS} = Slice(rows, zero, num_drafts, axis)
    {names.DRAFT_LOGITS} = OneHot({names.DRAFT_TOKENS}, depth, off_on)
}}"""

_REFINER = f"""<ir_version: 10, opset_import: ["": 24]>
script (float[B, M, {VOCAB}] {names.DRAFT_LOGITS}, int64[B, M] {names.DRAFT_TOKENS}, int64[B] {names.ANCHOR},
        int64[B] {names.PREVIOUS})
    => (int64[B, M] {names.REFINED_TOKENS}, float[B, M, {VOCAB}] {names.REFINED_LOGITS})
<int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{-2}}, int64[1] last = {{-1}}, int64 v = {{{VOCAB}}},
 float[2] off_on = {{0, 1000}}>
{{
    previous_column = Unsqueeze({names.PREVIOUS}, one)
    anchor_column = Unsqueeze({names.ANCHOR}, one)
    tokens = Concat<axis = 1>(previous_column, anchor_column, {names.DRAFT_TOKENS})
    first = Slice(tokens, zero, two, one)
    second = Slice(tokens, one, last, one)
    row = Mul(first, v)
    index = Add(row, second)
    {names.REFINED_TOKENS} = Gather(script_table, index)
    {names.REFINED_LOGITS} = OneHot({names.REFINED_TOKENS}, v, off_on)
}}"""


def _script_drafter(path: Path, table: NDArray[np.int64], draft: DraftRecord) -> None:
    """Make the graph draft from `table`, with logits that say so; its cache and hidden states stay real.

    The logits of a reduced vocabulary stay real too: not every right token is in it.
    """
    model = onnx.load(path, load_external_data=False)
    replaced = {names.DRAFT_TOKENS: "model_tokens", names.DRAFT_LOGITS: "model_logits"}
    if draft.draft_vocab_size < VOCAB:
        del replaced[names.DRAFT_LOGITS]
    for node in model.graph.node:
        node.input[:] = [replaced.get(name, name) for name in node.input]
        node.output[:] = [replaced.get(name, name) for name in node.output]
    added = onnx.parser.parse_graph(_DRAFTER)
    model.graph.node.extend(node for node in added.node if node.op_type != "OneHot" or len(replaced) == 2)
    constants = {"script_table": table, "script_first_slot": np.array([draft.first_slot])}
    arrays = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    model.graph.initializer.extend([*added.initializer, *arrays])
    onnx.save(model, path)


def _script_refiner(path: Path, table: NDArray[np.int64]) -> None:
    model = onnx.parser.parse_model(_REFINER)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "script_table"))
    onnx.save(model, path)


class BundleMaker:
    """Makes changed copies of the tiny bundle, each with a manifest of its own."""

    def __init__(self, original: Path, root: Path) -> None:
        self._original, self._root, self._count = original, root, 0

    def __call__(
        self,
        script: Script | None = None,
        *,
        original: Path | None = None,
        without: Sequence[str] = (),
        text: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Path:
        """A bundle that drafts by `script`.

        original: copy this bundle instead. without: roles to leave out.
        text: replaces fields of text.json. changes: of the manifest.
        """
        self._count += 1
        folder = Path(shutil.copytree(original or self._original, self._root / f"bundle{self._count}"))
        if script is not None:
            draft = read_manifest(folder).draft
            assert draft is not None
            _script_drafter(folder / GRAPHS_FOLDER / "drafter.onnx", script.table(), draft)
        if script is not None and script.refiner:
            _script_refiner(folder / GRAPHS_FOLDER / "refiner.onnx", script.follows())
        if text is not None:
            path = folder / TOKENIZER_FOLDER / "text.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | text))
        self.record(folder, **self._without(folder, without), **changes)
        return folder

    def _without(self, folder: Path, roles: Sequence[str]) -> dict[str, Any]:
        """Remove the files of `roles`; what changes in the manifest."""
        if not roles:
            return {}
        manifest = read_manifest(folder)
        for path in (path for role in roles for path in (folder / GRAPHS_FOLDER).glob(f"{role}.*")):
            path.unlink()
        changes: dict[str, Any] = dict.fromkeys(roles)
        changes["graphs"] = {role: graph for role, graph in manifest.graphs.items() if role not in roles}
        changes["parity"] = tuple(check for check in manifest.parity if check.graph not in roles)
        text = {f"{role}_tokenizer": None for role in roles}
        changes["text"] = dataclasses.replace(manifest.text, **text)
        draft = dataclasses.replace(manifest.draft, refine_passes=0)
        changes["draft"] = None if names.DRAFTER in roles else draft
        return changes

    @staticmethod
    def record(folder: Path, **changes: Any) -> None:
        """Write the manifest that belongs to the files of `folder` as they are now."""
        manifest = read_manifest(folder)
        changes.setdefault("files", record_files(folder))
        write_manifest(folder, dataclasses.replace(manifest, **changes))


@pytest.fixture(scope="session")
def scripted_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> BundleMaker:
    """Factory of changed copies of the tiny bundle."""
    return BundleMaker(tiny_bundle, tmp_path_factory.mktemp("scripted"))
