"""Catalogue pages for numerical problems (SF4..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF401": Page(
        "the loss is not finite",
        "The loss of a step is NaN or infinite on some rank. Surefoot's own runs do not update the weights with it; "
        "other trainers may.",
        "If the finding names large weights, the updates were too large: lower learning_rate or max_grad_norm, or add "
        "warmup_steps. Else look at the row that it names. Resume from the last good checkpoint.",
        ("modelscope/ms-swift#1099",),
        severity="error",
    ),
    "SF402": Page(
        "a gradient is not finite",
        "The gradient of the named parameters is not finite, though the loss is. Surefoot's own runs do not update the "
        "weights with it; other trainers may, and their logs may hide a loss that is not finite.",
        "Lower learning_rate or max_grad_norm, and resume from the last good checkpoint.",
        severity="error",
    ),
    "SF403": Page(
        "the loss has jumped and stays up",
        "Five steps in a row have a higher loss than each of the thirty before them, by a factor of 1.5 and by half a "
        "nat in the median, and gradients were three times as large as usual when it happened: the updates are too "
        "large.",
        "Resume from a checkpoint before the jump with a lower learning_rate, more warmup_steps or a lower "
        "max_grad_norm, and look at the rows of that step.",
        ("modelscope/ms-swift#1099",),
    ),
    "SF404": Page(
        "a router sends nearly all tokens to the same experts",
        "Over fifty steps of a run that trains its routers, as many experts of a layer as a token chooses got nearly "
        "all of its rows.",
        "Set router_aux_loss_coef (0.001 to 0.01), or leave `router` out of target_modules.",
    ),
    "SF405": Page(
        "experts that get no token any more",
        "Over fifty steps of a run that trains its routers they got no token, where each would have got hundreds if "
        "all were used evenly. Earlier they got at least half of that.",
        "Set router_aux_loss_coef, or leave `router` out of target_modules.",
        ("hpcaitech/ColossalAI#5426",),
        severity="info",
    ),
    "SF406": Page(
        "gradients grow with the learning rate",
        "Over blocks of ten steps the gradient norm has only grown, to five times its lowest value, while the learning "
        "rate rose and the loss rose by more than its noise. Usually the loss jumps next.",
        "Lower learning_rate, or lengthen warmup_steps.",
    ),
    "SF407": Page(
        "the loss rose above its first value early",
        "In the first thirty steps, three losses in a row are above the first one by a factor of 1.5 and by a nat, and "
        "gradients have grown to three times the first; or one loss is above 13 nats, which is worse than equal "
        "probabilities for every token. A loss that falls again afterwards seldom reaches what it would have without.",
        "Start again with a tenth of this learning_rate, or with warmup_steps.",
    ),
    "SF408": Page(
        "gradients are exactly zero",
        "The gradient norm of five steps in a row is exactly zero, though the loss is not. After updates that were too "
        "large, activations can be so far out that no gradient passes; or nothing that is trained has an influence on "
        "the loss.",
        "Start again, or from a checkpoint before the step, with a tenth of this learning_rate. If gradients were zero "
        "from the first step on, look at target_modules, and at what is frozen.",
    ),
    "SF409": Page(
        "the loss does not move at all",
        "The losses of the first fifty steps are equal to seven digits: the updates are too small for the numbers that "
        "they are added to, or reach no weight that the loss depends on.",
        "Raise learning_rate (1e-4 is usual for LoRA, 1e-5 for full fine-tuning), and look at target_modules.",
    ),
    "SF410": Page(
        "the evaluation loss rises while the training loss falls",
        "Three evaluations in a row are each above the one before, the last by a tenth above the lowest, and the "
        "training loss has fallen meanwhile: the model learns the rows by heart.",
        "Export the checkpoint of the lowest evaluation loss (`surefoot export RUN TARGET --step N`). Train for fewer "
        "steps, with more or more varied rows, a lower learning_rate or a smaller lora_rank.",
        severity="info",
    ),
}
