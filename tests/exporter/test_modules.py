"""The three modules against the published maths, written here a second time: float64, plain loops, no cache.

module     reference                         what could be wrong
target     transformers' own classes         rope, biases, norms, windows, tied head, taps, positions in the cache
drafter    `naive_drafter`, `visible`        context/block offset, masks, cached rows, slot 0, reduced vocabulary
refiner    `naive_refiner`                   folding, causality, the token before each slot, short blocks
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from xpress_export.exporter.configs import DecoderConfig, DrafterConfig, RefinerConfig, RopeConfig
from xpress_export.exporter.decoder_config import decoder_config
from xpress_export.exporter.modules import Drafter, Refiner, Target, fold_mixer

Array = NDArray[np.float64]

TOLERANCE = {"target": 1e-4, "drafter": 1e-4, "refiner": 1e-5}
"""Relative error allowed between a float32 module and its reference, by stage."""

E, HEADS, KV_HEADS, D, V, N, TAPS, THETA, EPS = 24, 4, 2, 6, 40, 5, 2, 100.0, 1e-6


def assert_close(got: torch.Tensor, expected: Any, stage: str) -> None:
    error = np.abs(got.double().numpy() - np.asarray(expected, np.float64))
    assert got.shape == np.shape(expected)
    relative = np.linalg.norm(error) / np.linalg.norm(expected)
    assert relative <= TOLERANCE[stage], f"max {error.max():.3g}, mean {error.mean():.3g}"


def randomize(module: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.ndim == 1 and not name.endswith("bias")
        parameter.data = 1 + 0.3 * noise if is_norm else 0.3 * noise


def weights_of(module: torch.nn.Module) -> dict[str, Array]:
    return {name: tensor.double().numpy() for name, tensor in module.state_dict().items()}


# The maths, from facts/drafter.md (2.2, 2.3) and facts/refiner.md (2), without a look at the modules.


def rms(x: Array, weight: Array) -> Array:
    return x / math.sqrt(float(np.mean(x * x)) + EPS) * weight


def rope(head: Array, position: int) -> Array:
    out = head.copy()
    for i in range(D // 2):
        angle = position * THETA ** (-2 * i / D)
        a, b = head[i], head[i + D // 2]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + D // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def swiglu(w: dict[str, Array], prefix: str, x: Array) -> Array:
    inner = silu(w[f"{prefix}gate_proj.weight"] @ x) * (w[f"{prefix}up_proj.weight"] @ x)
    return w[f"{prefix}down_proj.weight"] @ inner


def visible(q: int, k: int, window: int | None, causal: bool) -> bool:
    """Whether the query at position q sees the key at position k."""
    if causal and k > q:
        return False
    return window is None or (q - k < window and (causal or k - q < window))


def naive_drafter(w: dict[str, Array], config: DrafterConfig, features: Array, block_ids: list[int]) -> Array:
    """Hidden states [N, E] of a block whose anchor follows the `features` [s, K*E] of all earlier tokens."""
    anchor = len(features)
    context = [rms(w["fc.weight"] @ row, w["hidden_norm.weight"]) for row in features]
    hidden = [w["embed_tokens.weight"][token] for token in block_ids]
    for i, kind in enumerate(zip(config.decoder.layer_windows, config.causal_layers, strict=True)):
        hidden = naive_layer(w, f"layers.{i}.", context, hidden, anchor, kind)
    return np.stack([rms(h, w["norm.weight"]) for h in hidden])


def naive_layer(
    w: dict[str, Array],
    layer: str,
    context: list[Array],
    hidden: list[Array],
    anchor: int,
    kind: tuple[int | None, bool],
) -> list[Array]:
    normed = [rms(h, w[f"{layer}input_layernorm.weight"]) for h in hidden]
    rows = [*context, *normed]  # row p is at position p: the block follows the context

    def head(which: str, row: Array, h: int) -> Array:
        return w[f"{layer}self_attn.{which}_proj.weight"][h * D : (h + 1) * D] @ row

    def rotated(which: str, row: Array, h: int, position: int) -> Array:
        return rope(rms(head(which, row, h), w[f"{layer}self_attn.{which}_norm.weight"]), position)

    out = []
    for j, h_j in enumerate(hidden):
        position, attended = anchor + j, []
        for h in range(HEADS):
            group = h // (HEADS // KV_HEADS)
            query = rotated("q", normed[j], h, position)
            # context rows are all earlier than the block, so `visible` needs no case of its own for them
            seen = [p for p in range(len(rows)) if visible(position, p, *kind)]
            scores = [query @ rotated("k", rows[p], group, p) / math.sqrt(D) for p in seen]
            weights = np.exp(np.array(scores) - max(scores))
            values = [head("v", rows[p], group) for p in seen]
            attended.append(sum(a * v for a, v in zip(weights / weights.sum(), values, strict=True)))
        x = h_j + w[f"{layer}self_attn.o_proj.weight"] @ np.concatenate(attended)
        out.append(x + swiglu(w, f"{layer}mlp.", rms(x, w[f"{layer}post_attention_layernorm.weight"])))
    return out


def naive_previous(first_slot: int, drafts: list[int], anchor: int, previous: int) -> list[int]:
    """The token before each slot: fill-in blocks start with the anchor, anchor-sampled ones with a draft."""
    return [previous, anchor, *drafts[:-1]] if first_slot else [anchor, *drafts[:-1]]


def naive_refiner(w: dict[str, Array], base: Array, hidden: Array, previous: list[int], first_slot: int) -> Array:
    """Refined logits [N - first_slot, Vd]; `w` with the mixer as checkpoints store it, raw."""
    slots, mean = len(hidden), hidden.mean(0)
    a = [
        w["in_proj.weight"]
        @ np.concatenate([w["down_h.weight"] @ hidden[k], w["down_g.weight"] @ mean, w["w1.weight"][previous[k]]])
        for k in range(slots)
    ]
    logits = []
    for k in range(first_slot, slots):
        x = a[k].copy()
        for c in range(len(x)):
            x[c] += sum(w["mix.L"][c, k, j] * a[j][c] for j in range(k + 1))
        logits.append(base[k - first_slot] + w["w2.weight"] @ (x + swiglu(w, "mlp.", x)))
    return np.stack(logits)


# Target


def hf_models() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> transformers' model type and config keys."""
    scaled = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    llama3 = {**scaled, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    sliding = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    return {
        "llama": ("llama", {}),
        "llama, tied": ("llama", {"tie_word_embeddings": True}),
        "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
        "llama, llama3 rope": ("llama", {"rope_parameters": llama3}),
        "llama, yarn rope": ("llama", {"rope_parameters": {**scaled, "rope_type": "yarn"}}),
        "llama, linear rope": ("llama", {"rope_parameters": {**scaled, "rope_type": "linear"}}),
        "mistral, sliding": ("mistral", {"sliding_window": 5}),
        "qwen2": ("qwen2", {}),
        "qwen2, one layer slides": ("qwen2", sliding),
        "qwen3": ("qwen3", {}),
        "qwen3, sliding, tied": ("qwen3", {**sliding, "tie_word_embeddings": True}),
    }


@pytest.fixture
def make_target() -> Callable[..., tuple[Any, Target]]:
    """Transformers' model and ours with its weights, for a name of `hf_models`."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    def make(name: str, taps: tuple[int, ...] = ()) -> tuple[Any, Target]:
        family, changes = hf_models()[name]
        keys = {
            "hidden_size": E,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "vocab_size": V,
            "max_position_embeddings": 64,
            "rope_theta": 1e4,
            "rms_norm_eps": EPS,
            "tie_word_embeddings": False,
            **({"head_dim": D} if family != "qwen2" else {}),
            **changes,
        }
        reference = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**keys), attn_implementation="eager").eval()
        randomize(reference)
        target = Target(decoder_config(reference.config.to_dict(), family, name), taps).eval()
        missing, unexpected = target.load_state_dict(reference.state_dict(), strict=False)
        assert not missing and not unexpected
        return reference, target

    return make


def empty_cache(decoder: DecoderConfig, batch: int, capacity: int = 32) -> list[torch.Tensor]:
    """A cache full of what earlier requests left."""
    shape = (batch, decoder.num_kv_heads, capacity, decoder.head_dim)
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(shape, generator=generator) for _ in range(2 * decoder.num_layers)]


@pytest.mark.parametrize("name", hf_models())
def test_target_is_transformers_model(make_target: Any, name: str) -> None:
    """Two rows of a batch at different positions, with tokens written, rejected and overwritten."""
    reference, target = make_target(name)
    ids = torch.randint(0, V, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids).logits
        cache = empty_cache(target.config, 2)
        _, _, cache = target(ids[:, :12].flip(1), torch.tensor([0, 0]), cache)
        for starts, length in (((0, 0), 10), ((10, 6), 9), ((19, 15), 1), ((20, 16), 4)):
            columns = torch.tensor(starts)[:, None] + torch.arange(length)
            logits, tapped, cache = target(ids.gather(1, columns), torch.tensor(starts), cache)
            rows = torch.stack([row[index] for row, index in zip(expected, columns, strict=True)])
            assert_close(logits, rows, "target")
    assert tapped is None
    assert (target.lm_head.weight is target.model.embed_tokens.weight) == ("tied" in name)


def test_sliding_windows_and_rope_scaling_matter_here(make_target: Any) -> None:
    """Control of the test above: the variants differ from the plain model, so they are really compared."""
    ids = torch.arange(24).unsqueeze(0)
    with torch.inference_mode():
        for family in ("llama", "qwen2", "qwen3"):
            plain = make_target(family)[0](ids).logits
            for name in (n for n in hf_models() if n.startswith(f"{family}, ") and "tied" not in n):
                assert (make_target(name)[0](ids).logits - plain).abs().max() > 0.1, name


def test_tap_of_layer_i_is_hidden_states_i_plus_1_in_the_order_given(make_target: Any) -> None:
    """Layer -1 is the embedding; the last layer's is after the final norm, as transformers reports it."""
    taps = (1, -1, 2, 0)
    reference, target = make_target("qwen3", taps)
    ids = torch.randint(0, V, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        states = reference(ids, output_hidden_states=True).hidden_states
        _, tapped, _ = target(ids, torch.tensor([0]), empty_cache(target.config, 1))
    assert_close(tapped, torch.cat([states[i + 1] for i in taps], dim=-1), "target")
    assert all((a - b).abs().max() > 0.1 for n, a in enumerate(states) for b in states[:n])


# Drafter

KINDS = {
    "full": ((None, None), (False, False)),
    "sliding, causal": ((4, None), (True, False)),
    "sliding, two-sided": ((3, 3), (False, False)),
    "full, causal": ((None, None), (True, True)),
    "window longer than the context": ((100, None), (True, False)),
}


@pytest.fixture
def make_drafter() -> Callable[..., Drafter]:
    def make(kind: str = "full", **changes: Any) -> Drafter:
        windows, causal = KINDS[kind]
        decoder = DecoderConfig(
            family="qwen3",
            hidden_size=E,
            intermediate_size=20,
            num_layers=2,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=D,
            vocab_size=V,
            rms_norm_eps=EPS,
            rope=RopeConfig(inv_freq=tuple(THETA ** (-2 * i / D) for i in range(D // 2))),
            max_positions=64,
            tied_head=False,
            qk_norm=True,
            layer_windows=windows,
        )
        config = DrafterConfig(
            decoder=decoder,
            block_size=N,
            mask_token_id=V - 1,
            target_layer_ids=tuple(range(TAPS)),
            target_hidden_size=E,
            first_slot=1,
            causal_layers=causal,
        )
        module = Drafter(dataclasses.replace(config, **changes)).eval()
        randomize(module)
        return module

    return make


def features_of(num_rows: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(1, num_rows, TAPS * E, generator=torch.Generator().manual_seed(seed))


def block_of(anchor: int, slots: int) -> torch.Tensor:
    return torch.tensor([[anchor, *[V - 1] * (slots - 1)]])


def draft(
    module: Drafter, calls: list[tuple[torch.Tensor, int]], block: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits after a conversation of calls, each (rows, how many of them are committed)."""
    cache, written = empty_cache(module.config.decoder, 1), 0
    with torch.inference_mode():
        for rows, committed in calls:
            positions = torch.tensor([committed]), torch.tensor([written])
            hidden, logits, cache = module(rows, *positions, block, cache)
            written += committed
    return hidden, logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [2, N])
def test_drafter_over_two_cached_calls(make_drafter: Any, kind: str, slots: int) -> None:
    """Rows past `num_committed` are another conversation's: they must not be seen, then or later."""
    module, block, features = make_drafter(kind), block_of(7, slots), features_of(9)
    junk = features_of(4, seed=4)
    weights, rows = weights_of(module), features[0].double().numpy()
    first = torch.cat((features[:, :6], junk), dim=1)
    second = torch.cat((features[:, 6:9], junk[:, :1]), dim=1)
    for calls, num_rows in (([(first, 6)], 6), ([(first, 6), (second, 3)], 9)):
        hidden, logits = draft(module, calls, block)
        expected = naive_drafter(weights, module.config, rows[:num_rows], block[0].tolist())
        assert_close(hidden[0], expected, "drafter")
        assert_close(logits[0], expected[1:] @ weights["lm_head.weight"].T, "drafter")


def test_masks_of_the_kinds_differ(make_drafter: Any) -> None:
    """Control: on this conversation every kind but the window that hides nothing drafts something else."""
    hidden = {kind: draft(make_drafter(kind), [(features_of(9), 9)], block_of(7, N))[0] for kind in KINDS}
    hidden.pop("window longer than the context")
    kinds = list(hidden)
    for i, a in enumerate(kinds):
        for b in kinds[:i]:
            assert (hidden[a] - hidden[b]).abs().max() > 0.01, (a, b)


@pytest.mark.parametrize(("first_slot", "num_drafts"), [(1, N - 1), (0, N)])
def test_which_slots_draft(make_drafter: Any, first_slot: int, num_drafts: int) -> None:
    """Fill-in drafters discard slot 0, the anchor; anchor-sampled ones draft from it."""
    module = make_drafter(first_slot=first_slot)
    hidden, logits = draft(module, [(features_of(6), 6)], block_of(7, N))
    assert logits.shape == (1, num_drafts, V)
    assert_close(logits, hidden[:, first_slot:] @ module.lm_head.weight.detach().T, "drafter")
    assert module.config.num_draft_tokens == num_drafts


class ShiftedRope(torch.nn.Module):
    """Adds to the positions of the context, which has `num_rows` rows, and of the block."""

    def __init__(self, rope: torch.nn.Module, num_rows: int, context: int, block: int) -> None:
        super().__init__()
        self.rope, self.num_rows, self.by = rope, num_rows, (context, block)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> Any:
        return self.rope(positions + self.by[positions.shape[1] != self.num_rows], dtype)


def test_only_the_distance_between_context_and_block_matters(make_drafter: Any) -> None:
    module, calls, block = make_drafter(), [(features_of(6), 6)], block_of(7, N)
    plain, original = draft(module, calls, block)[0], module.rope

    def shifted(context: int, by: int) -> torch.Tensor:
        module.rope = ShiftedRope(original, 6, context, by)
        return draft(module, calls, block)[0]

    assert_close(shifted(13, 13), plain, "drafter")
    for context, by in ((0, 1), (1, 0), (0, -1)):
        assert (shifted(context, by) - plain).abs().max() > 0.05


def test_order_of_taps_matters(make_drafter: Any) -> None:
    module, rows = make_drafter(), features_of(6)
    swapped = torch.cat((rows[..., E:], rows[..., :E]), dim=-1)
    plain, other = (draft(module, [(r, 6)], block_of(7, N))[0] for r in (rows, swapped))
    assert (plain - other).abs().max() > 0.05


def test_scale_of_the_features_does_not_matter(make_drafter: Any) -> None:
    """`hidden_norm` undoes it, so real features of 2e4 draft what small ones do."""
    module, rows = make_drafter(), features_of(6)
    plain, other = (draft(module, [(r, 6)], block_of(7, N))[0] for r in (rows, rows * 2e4))
    assert_close(other, plain, "drafter")


def test_rows_of_a_batch_are_independent(make_drafter: Any) -> None:
    """Two requests that accepted differently in one call give what each gives alone."""
    module, rows = make_drafter("sliding, causal"), torch.cat((features_of(8), features_of(8, seed=5)))
    blocks = torch.cat((block_of(7, N), block_of(9, N)))
    cache = empty_cache(module.config.decoder, 2)
    with torch.inference_mode():
        _, _, cache = module(rows, torch.tensor([8, 3]), torch.tensor([0, 0]), blocks, cache)
        hidden, *_ = module(rows[:, :4].flip(1), torch.tensor([1, 4]), torch.tensor([8, 3]), blocks, cache)
    for i, committed in enumerate(((8, 1), (3, 4))):
        calls = [(rows[i : i + 1], committed[0]), (rows[i : i + 1, :4].flip(1), committed[1])]
        assert_close(hidden[i : i + 1], draft(module, calls, blocks[i : i + 1])[0], "drafter")


def test_reduced_draft_vocabulary(make_drafter: Any) -> None:
    """The head has 6 rows; a row's token is told by `target_ids`."""
    module = make_drafter(draft_vocab_size=6)
    module.vocab.target_ids = torch.tensor([3, 1, 4, 15, 9, 26])
    hidden, logits = draft(module, [(features_of(6), 6)], block_of(7, N))
    assert_close(logits, hidden[:, 1:] @ module.lm_head.weight.detach().T, "drafter")
    assert logits.shape[-1] == 6
    tokens = module.vocab(logits.argmax(-1))
    assert tokens.tolist() == [[[3, 1, 4, 15, 9, 26][row] for row in logits[0].argmax(-1).tolist()]]


# Refiner


@pytest.fixture
def make_refiner() -> Callable[..., Refiner]:
    def make(kind: str = "xpress", first_slot: int = 1, folded: bool = False, draft_vocab: int = V) -> Refiner:
        config = RefinerConfig(
            kind=kind,
            rank=6,
            hidden_size=E,
            vocab_size=V,
            draft_vocab_size=draft_vocab,
            block_size=N,
            num_passes=3,
            mlp_hidden=10,
        )
        module = Refiner(config, first_slot, folded=folded).eval()
        randomize(module)
        module.w1.weight.data *= 4  # so that the token before a slot matters
        module.w2.weight.data *= 4
        return module

    return make


@dataclasses.dataclass
class Sample:
    base: torch.Tensor
    hidden: torch.Tensor
    drafts: list[int]
    anchor: int = 11
    previous: int = 12

    def refine(self, module: Refiner, drafts: list[int] | None = None) -> torch.Tensor:
        """One pass of the module: refined logits [drafts, Vd]."""
        tokens = torch.tensor([self.drafts if drafts is None else drafts])
        known = torch.tensor([self.anchor]), torch.tensor([self.previous])
        with torch.inference_mode():
            refined: torch.Tensor = module(self.base[None], tokens, *known, self.hidden[None])[0]
        return refined

    def naive(self, weights: dict[str, Array], first_slot: int, drafts: list[int] | None = None) -> Array:
        tokens = self.drafts if drafts is None else drafts
        previous = naive_previous(first_slot, tokens, self.anchor, self.previous)
        base, hidden = self.base.double().numpy(), self.hidden.double().numpy()
        return naive_refiner(weights, base, hidden, previous, first_slot)


def sample(first_slot: int = 1, slots: int = N, draft_vocab: int = V) -> Sample:
    generator = torch.Generator().manual_seed(5)
    num_drafts = slots - first_slot
    return Sample(
        base=torch.randn(num_drafts, draft_vocab, generator=generator),
        hidden=torch.randn(slots, E, generator=generator),
        drafts=torch.randint(0, V, (num_drafts,), generator=generator).tolist(),
    )


@pytest.mark.parametrize("first_slot", [1, 0])
@pytest.mark.parametrize("slots", [2, 3, N])
def test_refiner_maths(make_refiner: Any, first_slot: int, slots: int) -> None:
    """Raw and folded, whole blocks and shorter ones, which use the leading slots of the mixer."""
    raw, folded = make_refiner(first_slot=first_slot), make_refiner(first_slot=first_slot, folded=True)
    state = {name: t for name, t in raw.state_dict().items() if name != "mix.L"}
    folded.load_state_dict({**state, "mix.folded": fold_mixer(raw.mix.L)})
    given = sample(first_slot, slots)
    expected = given.naive(weights_of(raw), first_slot)
    assert_close(given.refine(raw), expected, "refiner")
    assert_close(given.refine(folded), expected, "refiner")


@pytest.mark.parametrize("times", [0, 2])
def test_a_mixer_folded_never_or_twice_is_wrong(make_refiner: Any, times: int) -> None:
    raw, folded = make_refiner(), make_refiner(folded=True)
    mixer = raw.mix.L.detach()
    for _ in range(times):
        mixer = fold_mixer(mixer)
    state = {name: t for name, t in raw.state_dict().items() if name != "mix.L"}
    folded.load_state_dict({**state, "mix.folded": mixer})
    given = sample()
    assert (given.refine(folded) - given.refine(raw)).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["xpress", "markov"])
@pytest.mark.parametrize("first_slot", [1, 0])
def test_refiner_is_strictly_causal(make_refiner: Any, kind: str, first_slot: int) -> None:
    """Another draft token at j changes nothing up to j, bit for bit, and the very next slot."""
    module, given = make_refiner(kind, first_slot), sample(first_slot)
    plain = given.refine(module)
    for j in range(len(given.drafts)):
        drafts = list(given.drafts)
        drafts[j] = (drafts[j] + 17) % V
        changed = (given.refine(module, drafts) - plain).abs().amax(-1)
        assert changed[: j + 1].max() == 0
        assert j + 1 == len(drafts) or changed[j + 1] > 0.1
        assert kind == "xpress" or changed[j + 2 :].sum() == 0  # a Markov head looks back one token


@pytest.mark.parametrize("first_slot", [1, 0])
def test_markov_head_is_the_bias_of_the_token_before(make_refiner: Any, first_slot: int) -> None:
    module, given = make_refiner("markov", first_slot), sample(first_slot)
    weights = weights_of(module)
    before = [given.anchor, *given.drafts[:-1]]  # of each draft token, whatever the slots are called
    bias = np.stack([weights["w2.weight"] @ weights["w1.weight"][token] for token in before])
    assert_close(given.refine(module), given.base.double().numpy() + bias, "refiner")
    assert set(module.state_dict()) == {"w1.weight", "w2.weight"}


def left_to_right(logits: Callable[[list[int]], Array], num_drafts: int) -> list[int]:
    """Decode a block one token at a time; slots not reached yet hold a token that is never right."""
    tokens = [0] * num_drafts
    for j in range(num_drafts):
        tokens[j] = int(logits(tokens)[j].argmax())
    return tokens


@pytest.mark.parametrize("kind", ["xpress", "markov"])
@pytest.mark.parametrize("first_slot", [1, 0])
def test_a_pass_per_draft_token_equals_left_to_right_decoding(make_refiner: Any, kind: str, first_slot: int) -> None:
    """And pass i fixes slot i for good. Markov heads are held to xPress's reference by the test above."""
    module, given = make_refiner(kind, first_slot), sample(first_slot)
    weights = weights_of(module)

    def logits(tokens: list[int]) -> Array:
        refined = given.refine(module, tokens).double().numpy()
        return given.naive(weights, first_slot, tokens) if kind == "xpress" else refined

    expected = left_to_right(logits, len(given.drafts))
    tokens = given.base.argmax(-1).tolist()
    assert tokens != expected, "a refiner that changes nothing tests nothing"
    for num_passes in range(1, len(tokens) + 1):
        tokens = given.refine(module, tokens).argmax(-1).tolist()
        assert tokens[:num_passes] == expected[:num_passes]
    assert tokens == expected


def test_refiner_with_a_reduced_draft_vocabulary(make_refiner: Any) -> None:
    """Tokens are the target's ids, logits the rows of the reduced head."""
    module, given = make_refiner(draft_vocab=6), sample(draft_vocab=6)
    module.vocab.target_ids = torch.tensor([3, 1, 4, 15, 9, 26])
    weights = {name: w for name, w in weights_of(module).items() if name != "vocab.target_ids"}
    refined = given.refine(module)
    assert_close(refined, given.naive(weights, 1), "refiner")
    assert module.vocab(refined.argmax(-1)).tolist() == [
        [3, 1, 4, 15, 9, 26][row] for row in refined.argmax(-1).tolist()
    ]
