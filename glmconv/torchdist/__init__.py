"""Megatron-Core ``torch_dist`` checkpoints, read and written with the standard library alone.

No module here imports torch. What it gives to the rest of glmconv:

* ``record``: the bytes around a tensor in a ``.distcp`` file.
  ``frame(dtype, shape) -> Frame(head, tail)``; a record is ``head + payload + tail``.
  ``len(head)`` is a multiple of 64, so a record may start at any offset (payload offset minus
  ``len(head)``) and records may have gaps between them.
  ``payload_offset(fd, dtype, shape, offset, length, where) -> int`` finds the payload of a
  record that anyone wrote and proves its dtype, shape and strides.
* ``metadata``: ``read_metadata(unit_dir) -> Metadata(tensors, objects)`` of ``TensorEntry(dtype,
  shape, chunks)``, ``Chunk(offsets, sizes, file, offset, length)`` and ``ObjectEntry(file, offset,
  length)``; ``parse_metadata(data, where)`` the same from bytes, ``check(metadata, file_sizes) ->
  list[Defect]`` the content check alone, and ``payload_offsets(unit_dir, metadata, names=None) ->
  dict[name, tuple[int, ...]]`` the absolute payload offset of each chunk.
* ``emit``: ``metadata_bytes(tensors, objects) -> bytes`` of a ``.metadata`` file, from mappings
  of the same entries.
* ``pickles``: ``loads(data, where, policy) -> value``: a pickle interpreter that cannot call anything.
* ``common``: ``read_common``, ``write_common``, ``args_namespace``, ``common_state``, ``METADATA_JSON``.
* ``extra_state``: ``extra_state_names(tensors) -> list[str]`` and ``EMPTY_STATE``, the stored value.
* ``location``: ``locate(path) -> Located(root, unit_dir, iteration)`` and ``detect_layout(path)``.
"""
