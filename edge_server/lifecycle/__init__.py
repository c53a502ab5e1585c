"""What happens to a model: load, validate, swap, canary, roll back; the modes none, explicit, poll.

Other rooms enter by `control` and `poll` (the modes), `loader.RepositoryLoader` with
`records.ModelTable` (models without a mode), and `records.Deployments`, `build.MemoryBudget` and
`fit.InterfaceRule` to construct them; `model_validation` and `model_spec` serve the command line.
"""
