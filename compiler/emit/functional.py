"""Operations that people write as torch.nn.functional calls, with the signatures written by hand.

`F.conv2d(x, self.weight, padding=1)`: an entry says which of the schema's arguments come first, by
position, and what the others are called there. An argument that is not named here may only be left
out at its default.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir.graph import Arg, Op
from .arguments import Names, spell_arg
from .expression import Expr, call


@dataclass(frozen=True, slots=True)
class Signature:
    """How F spells an operation."""

    name: str
    positional: tuple[str, ...]
    """The schema's names, in F's order."""
    optional: frozenset[str]
    """Those that F takes as None where they are missing."""
    keywords: Mapping[str, str]
    """The schema's name -> F's."""


def signature(name: str, positional: str, keywords: str = "") -> Signature:
    """Names, `?` after those that F has None for; `schema=functional` where keywords differ."""
    words = positional.split()
    pairs = (word.partition("=") for word in keywords.split())
    return Signature(
        name,
        tuple(word.removesuffix("?") for word in words),
        frozenset(word.removesuffix("?") for word in words if word.endswith("?")),
        {a: b or a for a, _, b in pairs},
    )


conv = "stride padding dilation groups"
transposed = "stride padding output_padding groups dilation"
pool = "stride padding dilation ceil_mode"
average = "stride padding ceil_mode count_include_pad divisor_override"
margin = "margin reduction"

signatures: Mapping[str, Signature] = {
    "linear": signature("linear", "input weight bias?"),
    "bilinear": signature("bilinear", "input1 input2 weight bias?"),
    "conv1d": signature("conv1d", "input weight bias?", conv),
    "conv2d": signature("conv2d", "input weight bias?", conv),
    "conv3d": signature("conv3d", "input weight bias?", conv),
    "conv_transpose1d": signature("conv_transpose1d", "input weight bias?", transposed),
    "conv_transpose2d": signature("conv_transpose2d", "input weight bias?", transposed),
    "conv_transpose3d": signature("conv_transpose3d", "input weight bias?", transposed),
    "embedding": signature("embedding", "indices weight", "padding_idx scale_grad_by_freq sparse"),
    "embedding_bag": signature(
        "embedding_bag", "indices weight offsets?",
        "scale_grad_by_freq mode sparse per_sample_weights include_last_offset padding_idx",
    ),
    "layer_norm": signature("layer_norm", "input normalized_shape weight? bias?", "eps"),
    "rms_norm": signature("rms_norm", "input normalized_shape weight?", "eps"),
    "group_norm": signature("group_norm", "input num_groups weight? bias?", "eps"),
    "batch_norm": signature(
        "batch_norm", "input running_mean running_var weight? bias?", "training momentum eps"
    ),
    "instance_norm": signature(
        "instance_norm", "input running_mean? running_var? weight? bias?",
        "use_input_stats momentum eps",
    ),
    "dropout": signature("dropout", "input p", "train=training"),
    "alpha_dropout": signature("alpha_dropout", "input p", "train=training"),
    "feature_alpha_dropout": signature("feature_alpha_dropout", "input p", "train=training"),
    "rrelu": signature("rrelu", "self lower upper", "training"),
    "relu": signature("relu", "self"),
    "relu6": signature("relu6", "self"),
    "gelu": signature("gelu", "self", "approximate"),
    "silu": signature("silu", "self"),
    "mish": signature("mish", "self"),
    "selu": signature("selu", "self"),
    "celu": signature("celu", "self", "alpha"),
    "elu": signature("elu", "self", "alpha"),
    "leaky_relu": signature("leaky_relu", "self", "negative_slope"),
    "hardswish": signature("hardswish", "self"),
    "hardsigmoid": signature("hardsigmoid", "self"),
    "hardtanh": signature("hardtanh", "self", "min_val max_val"),
    "hardshrink": signature("hardshrink", "self", "lambd"),
    "softshrink": signature("softshrink", "self", "lambd"),
    "softplus": signature("softplus", "self", "beta threshold"),
    "threshold": signature("threshold", "self threshold value"),
    "log_sigmoid": signature("logsigmoid", "self"),
    "glu": signature("glu", "self", "dim"),
    "prelu": signature("prelu", "self weight"),
    "cosine_similarity": signature("cosine_similarity", "x1 x2", "dim eps"),
    "pairwise_distance": signature("pairwise_distance", "x1 x2", "p eps keepdim"),
    "cross_entropy_loss": signature(
        "cross_entropy", "self target weight?", "ignore_index reduction label_smoothing"
    ),
    "nll_loss_nd": signature("nll_loss", "self target weight?", "ignore_index reduction"),
    "mse_loss": signature("mse_loss", "self target", "reduction"),
    "l1_loss": signature("l1_loss", "self target", "reduction"),
    "smooth_l1_loss": signature("smooth_l1_loss", "self target", "reduction beta"),
    "huber_loss": signature("huber_loss", "self target", "reduction delta"),
    "binary_cross_entropy": signature("binary_cross_entropy", "self target weight?", "reduction"),
    "binary_cross_entropy_with_logits": signature(
        "binary_cross_entropy_with_logits", "self target weight?", "pos_weight reduction"
    ),
    "kl_div": signature("kl_div", "self target", "reduction log_target"),
    # torch's own functions of these names do not take the schema's reduction by default
    "soft_margin_loss": signature("soft_margin_loss", "self target", "reduction"),
    "multilabel_margin_loss": signature("multilabel_margin_loss", "self target", "reduction"),
    "multi_margin_loss": signature(
        "multi_margin_loss", "self target", "p margin weight reduction"
    ),
    "margin_ranking_loss": signature("margin_ranking_loss", "input1 input2 target", margin),
    "hinge_embedding_loss": signature("hinge_embedding_loss", "self target", margin),
    "cosine_embedding_loss": signature("cosine_embedding_loss", "input1 input2 target", margin),
    "triplet_margin_loss": signature(
        "triplet_margin_loss", "anchor positive negative", "margin p eps swap reduction"
    ),
    "poisson_nll_loss": signature(
        "poisson_nll_loss", "input target", "log_input full eps reduction"
    ),
    "ctc_loss": signature(
        "ctc_loss", "log_probs targets input_lengths target_lengths",
        "blank reduction zero_infinity",
    ),
    "max_pool1d": signature("max_pool1d", "self kernel_size", pool),
    "max_pool2d": signature("max_pool2d", "self kernel_size", pool),
    "max_pool3d": signature("max_pool3d", "self kernel_size", pool),
    "max_pool1d_with_indices": signature("max_pool1d", "self kernel_size", pool),
    "max_pool2d_with_indices": signature("max_pool2d", "self kernel_size", pool),
    "max_pool3d_with_indices": signature("max_pool3d", "self kernel_size", pool),
    "avg_pool1d": signature(
        "avg_pool1d", "self kernel_size", "stride padding ceil_mode count_include_pad"
    ),
    "avg_pool2d": signature("avg_pool2d", "self kernel_size", average),
    "avg_pool3d": signature("avg_pool3d", "self kernel_size", average),
    "adaptive_avg_pool1d": signature("adaptive_avg_pool1d", "self output_size"),
    "adaptive_avg_pool2d": signature("adaptive_avg_pool2d", "self output_size"),
    "adaptive_avg_pool3d": signature("adaptive_avg_pool3d", "self output_size"),
    "adaptive_max_pool1d": signature("adaptive_max_pool1d", "self output_size"),
    "adaptive_max_pool2d": signature("adaptive_max_pool2d", "self output_size"),
    "adaptive_max_pool3d": signature("adaptive_max_pool3d", "self output_size"),
    "pad": signature("pad", "self pad", "mode value"),
    "im2col": signature("unfold", "self kernel_size", "dilation padding stride"),
    "col2im": signature("fold", "self output_size kernel_size", "dilation padding stride"),
    "one_hot": signature("one_hot", "self num_classes"),
    "pixel_shuffle": signature("pixel_shuffle", "self upscale_factor"),
    "pixel_unshuffle": signature("pixel_unshuffle", "self downscale_factor"),
    "scaled_dot_product_attention": signature(
        "scaled_dot_product_attention", "query key value",
        "attn_mask dropout_p is_causal scale enable_gqa",
    ),
}  # fmt: skip

reductions = ("none", "mean", "sum")
"""The schema counts them; F names them."""
bag_modes = ("sum", "mean", "max")
norm: Mapping[str, Arg] = {"momentum": 0.1, "eps": 1e-5, "use_input_stats": True}
blocks: Mapping[str, Arg] = {"dilation": 1, "padding": 0, "stride": 1}
usual: Mapping[str, Mapping[str, Arg]] = {
    "batch_norm": norm,
    "instance_norm": norm,
    "unfold": blocks,
    "fold": blocks,
    "poisson_nll_loss": {"log_input": True, "full": False, "eps": 1e-8, "reduction": 1},
    "embedding_bag": {
        "scale_grad_by_freq": False, "sparse": False, "mode": 1, "per_sample_weights": None,
        "include_last_offset": False, "padding_idx": None,
    },
}  # fmt: skip
"""What F takes where nothing is said and the schema has no default, or another."""


def functional(op: Op, form: Signature, names: Names) -> Expr:
    """A torch.nn.functional call."""
    given = dict(zip(op.arg_names, op.args, strict=True)) | dict(op.kwargs)
    if form.name == "embedding_bag":
        given.setdefault("mode", 0)  # the schema's default, F's is another
    texts, skipped = [], False
    for key in form.positional:
        if key not in given or (given[key] is None and key in form.optional):
            skipped = True
            continue
        text = spell_arg(single(key, given[key]), names, key).text
        texts.append(f"{key}={text}" if skipped else text)
    for key, shown in form.keywords.items():
        if key in given and not is_usual(op, form, key, given):
            texts.append(f"{shown}={functional_value(key, given, names)}")
    if has_indices(op) and any(op.outputs[1:]):
        texts.append("return_indices=True")
    return call(f"F.{form.name}", texts)


def is_usual(op: Op, form: Signature, key: str, given: Mapping[str, Arg]) -> bool:
    """Whether F takes a keyword's value where nothing is said."""
    own = usual.get(form.name, {})
    if key == "use_input_stats" and given.get("running_mean") is not None:
        return False
    if key in own:
        return single(key, given[key]) == own[key]
    return key in op.at_default and key != "train"


def outputs_of(op: Op) -> tuple[str, ...]:
    """The values that an op's text gives: F leaves out what embedding_bag keeps for its backward,
    and the indices of a maximum that nobody reads."""
    first_only = op.target.startswith("aten.embedding_bag.") or has_indices(op)
    return op.outputs[:1] if first_only and not any(op.outputs[1:]) else op.outputs


def has_indices(op: Op) -> bool:
    """Whether an op's second output tells where the maxima are."""
    return op.target.startswith("aten.adaptive_max_pool") or "_with_indices." in op.target


def single(key: str, value: Arg) -> Arg:
    """3 for (3, 3), where F takes one number for all dimensions."""
    if key not in ("kernel_size", "stride", "padding", "output_padding", "dilation", "output_size"):
        return value
    numbers = (
        isinstance(value, tuple) and bool(value) and all(isinstance(item, int) for item in value)
    )
    return value[0] if numbers and len(set(value)) == 1 else value  # type: ignore[index, arg-type]


def functional_value(key: str, given: Mapping[str, Arg], names: Names) -> str:
    """A keyword's value: flags of training follow the module, reductions have names."""
    value = given[key]
    if key == "use_input_stats" and given.get("running_mean") is None:
        return repr(value)  # without running statistics the input's are used in evaluation too
    if key in ("train", "training", "use_input_stats") and value is True:
        return "self.training"
    if key == "dropout_p":
        return f"{spell_arg(value, names, key).text} if self.training else 0.0"
    if key == "reduction" and isinstance(value, int):
        return f'"{reductions[value]}"'
    if key == "mode" and isinstance(value, int):
        return f'"{bag_modes[value]}"'
    return spell_arg(single(key, value), names, key).text
