"""Our loaders and policies against tensors computed by the published implementations (``vla3 parity``).

``parity/<family>.py`` says what a family computes:

* ``outputs(golden) -> dict[str, Tensor]``: under the golden tensors' names, through ``from_checkpoint`` and the
  policy's own methods, every size and count taken from the directory. It is given ``golden.without_values()``: names,
  shapes and dtypes of the outputs are known to it, their values are not.
* ``NOT_COMPUTED: dict[str, str]``: ``fnmatch`` pattern of golden outputs that are not computed, and why.
* ``masks(golden) -> dict[str, Tensor]``, optional: bool over a golden tensor's leading dimensions (its own shape or the
  first of its dimensions), True where the tensor has a meaning; a padded position has none.
"""
