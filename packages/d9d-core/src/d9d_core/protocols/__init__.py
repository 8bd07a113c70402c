"""Protocols of a job's components, one file for each seam. Implementations live in plugins.

Tensors cross these seams by name (``Mapping[str, Tensor]``), so that a dataset, a task and a model from three authors
meet without sharing classes. The names for language modelling, used by first-party packages (B samples, S positions):

    tokens     int64 [B, S]   input token ids
    targets    int64 [B, S]   token ids to predict; -100 where nothing is predicted
    positions  int64 [B, S]   position inside the document
    documents  int64 [B, S]   number of the document inside the sample; tokens see their own document only
    lengths    int64 [B]      tokens of a right-padded sample; absent if there is no padding, which counts nowhere
    labels     int64 [B]      class of the sample; -100 where it does not count
"""
