"""A transformer as a trainer runs it: seconds and bytes of every layout, in closed form.

Letters, here and in the modules:
b microbatch, s sequence, h hidden width, q and kv widths of queries and of keys, f feed-forward,
V vocabulary, L blocks; t tensor, c context, e expert, p pipeline, n data parallel degree, v chunks
of a device, m microbatches of a pipeline; T = b s / c tokens of a rank.
"""
