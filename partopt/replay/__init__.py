"""A stage of any model: one forward is recorded, and the stage's part of it replayed.

A model is any `nn.Module`: nothing says where its layers begin, and its Python runs between them.

    recording         one real forward, without weights (`weightless`), becomes `events`: calls of
                      units and of torch's functions between them (`unit_calls`, `event_builder`)
    cuts              the layers of a plan part the events; a value made before a cut and read
                      behind it crosses it
    forward           the model's own forward runs once more: events of this stage run, those of
                      others return placeholders, and where this stage is given one it takes the
                      tensor that was received
    replayed_stage    that as an `nn.Module`, and as what an engine runs (`stage`): forward,
                      backward, in two parts where a schedule asks (`split_backward`)
    buffers, packing  what layers keep from call to call; the tensors of a cut as one message

It knows nothing of ranks: `partopt.runtime` sends what crosses.
"""
