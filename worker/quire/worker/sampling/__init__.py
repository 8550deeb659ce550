"""From logits to tokens, and the rules that a token must keep.

    parameters.py       the sampling parameters of a sequence
    grammars.py         compiles grammars, and keeps them
    grammar_trial.py    the process in which a grammar is compiled first
    following.py        a sequence that follows a grammar token by token
    grammar_masks.py    the tokens that grammars allow in a step, made while its forward runs
    masks_aside.py      masks that no step waits for
    threads.py          threads for work that may take long or never end
    drafts.py           the rows of a sequence with drafts, and how many of these are right
    constraints.py      forbidden tokens and biases of logits
    row_parameters.py   the parameters of many sequences, in columns
    gumbel.py           noise of tokens, and draws on a CPU
    sampler.py          penalties, temperature, top-k, top-p, min-p, the seeded draw, log-probabilities
    prompt_logprobs.py  log-probabilities of a prompt's tokens

A token depends on its logits, the seed and its position, and not on the other rows of the batch. The logits do, by
rounding, unless the worker runs with --deterministic.
"""
