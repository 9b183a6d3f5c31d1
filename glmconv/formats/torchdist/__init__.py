"""Megatron-Core ``torch_dist`` files, read and written with the standard library alone.

No module here imports torch. From the bottom up:

* ``pickle``: a pickle interpreter that cannot call anything, and a writer of pickle opcodes.
  ``restricted.loads(data, where, policy)``. ``shortcuts``: its fast paths through ``.metadata``.
* ``archive``: the zip archive of ``torch.save``.
* ``record``: the bytes around a tensor in a ``.distcp`` file. ``frame(dtype, shape) -> Frame(head,
  tail, payload)``; a record is ``head + payload + tail``. ``len(head)`` is a multiple of 64, so a
  record starts at payload offset minus ``len(head)``, anywhere, and records may have gaps between
  them. ``payload_offset(fd, dtype, shape, offset, length, where)`` finds the payload of anyone's
  record and proves its dtype, shape and strides.
* ``entries``: ``TensorEntry``, ``Chunk``, ``ObjectEntry``, ``Metadata``.
* ``metadata``, ``metadata_reading``, ``coverage``: ``read_metadata(unit_dir) -> Metadata``, with every
  defect listed; ``payload_offsets(unit_dir, metadata, names=None)``: where each chunk's data lies.
* ``metadata_writing``: ``metadata_bytes(tensors, objects)``: a ``.metadata`` file.
* ``extra_state``: ``extra_state_names(shapes)`` and the value that they share, ``EMPTY_STATE``.
* ``common``: ``common_state``, ``write_common``, ``read_common``, ``METADATA_JSON``.
"""
