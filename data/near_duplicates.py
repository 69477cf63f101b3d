"""Groups near-duplicate documents, so that copies of one text do not end up on both sides of a train/val split.

Two documents are near-duplicates if the Jaccard similarity |A & B| / |A | B| of their sets of lines is at least
SIMILARITY. MinHash signatures estimate it (Broder, "On the resemblance and containment of documents", 1997), and
locality-sensitive hashing in bands of the signature finds the candidates (Leskovec, Rajaraman and Ullman, "Mining of
Massive Datasets", section 3.4): a pair of similarity s meets in some band with probability 1 - (1 - s^ROWS)^BANDS,
which is 87% at 0.5 and 99.97% at 0.7. Groups are connected components. Everything is deterministic.
"""
import zlib

import numpy as np

SIMILARITY = 0.5
BANDS, ROWS = 32, 4  # a signature has BANDS * ROWS hashes: the estimate's standard error is at most 0.044
LEADERS = 100        # documents of a bucket that a new one is compared with; more only share a licence header

_random = np.random.default_rng(1)
MULTIPLIERS = _random.integers(0, 2**63, (BANDS * ROWS, 1), dtype=np.uint64) * 2 + 1
OFFSETS = _random.integers(0, 2**63, (BANDS * ROWS, 1), dtype=np.uint64)


def signature(data):
    """The MinHash signature of a document (bytes), uint32 [BANDS * ROWS]: minima of multiply-shift hashes of its lines,
    white space at their ends and blank lines left out."""
    lines = {line.strip() for line in data.splitlines()} - {b""}
    if not lines:
        return np.zeros(BANDS * ROWS, np.uint32)
    hashes = np.fromiter(map(zlib.crc32, lines), np.uint64, len(lines))
    return ((hashes * MULTIPLIERS + OFFSETS) >> np.uint64(32)).min(axis=1).astype(np.uint32)


def group(signatures):
    """Returns for each document the index of the first document of its group."""
    signatures = np.asarray(signatures, np.uint32).reshape(-1, BANDS * ROWS)
    parents = list(range(len(signatures)))

    def root(i):
        while parents[i] != i:
            parents[i] = parents[parents[i]]
            i = parents[i]
        return i

    for band in range(BANDS):
        buckets = {}  # the band's hashes -> documents that are not similar to each other
        for i, row in enumerate(signatures[:, band * ROWS:(band + 1) * ROWS]):
            leaders = buckets.setdefault(row.tobytes(), [])
            similarities = (signatures[leaders] == signatures[i]).mean(axis=1) if leaders else np.zeros(1)
            best = int(similarities.argmax())
            if similarities[best] >= SIMILARITY:
                a, b = sorted((root(i), root(leaders[best])))
                parents[b] = a
            elif len(leaders) < LEADERS:
                leaders.append(i)
    return [root(i) for i in range(len(signatures))]
