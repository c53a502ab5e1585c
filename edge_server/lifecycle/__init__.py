"""What happens to a model: load, validate, swap, canary, roll back; the modes none, explicit, poll.

Other rooms enter by `control.RepositoryControl` and `poll_control.PollControl` (the modes),
`loader.RepositoryLoader` with `model_table.ModelTable` (models without a mode), and
`deployments.Deployments`, `budget.MemoryBudget` and `fit.InterfaceRule` to construct them;
`golden` and `model_spec` serve the command line.
"""
