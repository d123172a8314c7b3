"""How transfers are made: what the memory model counts and the programs hold, for both to share."""


def receives_ahead(distance: int) -> int:
    """Receives to post ahead between two stages that lie `distance` apart.

    With so many no rank waits for ever even if every send blocks until its receive is posted. Let
    F of microbatch m on stage s of P run from 2m + s to 2m + s + 1, and B from 2m + 2P - 1 - s on:
    GPipe (its backwards shifted) and 1F1B are in this order on every rank. A message of m sent
    after F on s, to stage t, then needs the receive that t posts before F of m - a, so
    2(m - a) + t < 2m + s + 1, which is a > (t - s - 1) / 2; gradients give the same.
    """
    return (distance + 1) // 2
