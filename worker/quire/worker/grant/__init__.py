"""Grants: decoded, and accepted or refused before anything touches the pool.

    gate.py         the signature, epoch, lease and number of a grant
    decoding.py     the grant with the client's additions: an AcceptedStep
    errors.py       refusals, and the one table from them to gRPC statuses

A refused step changes nothing, and its number can be used again.
"""
