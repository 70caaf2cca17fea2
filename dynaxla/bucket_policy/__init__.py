"""Bucket policies: map the size of a dim, or the sizes of several dims together, to the sizes they are padded to.

Every policy guarantees, for all sizes >= 0: `bucket(size) >= size`; a larger size never has a smaller bucket;
`bucket(bucket(size)) == bucket(size)`; the bucket depends on the size alone. Sizes 0 and 1 are their own buckets in
every policy, because Dynamo captures separate graphs for them. Sizes and buckets count elements along one dim.
The minimum and maximum of a marked dim are no part of a policy: `Bounded` adds them to one.
"""

from dynaxla.bucket_policy.base import BucketPolicy, JointPolicy, require_above, require_sizes
from dynaxla.bucket_policy.bounded import Bounded
from dynaxla.bucket_policy.sizes import *  # noqa: F403
from dynaxla.bucket_policy.sizes import DEFAULT, LEAST_WASTE, MOST_WASTE
from dynaxla.bucket_policy.sizes import __all__ as _sizes

__all__ = [
    "DEFAULT",
    "LEAST_WASTE",
    "MOST_WASTE",
    "Bounded",
    "BucketPolicy",
    "JointPolicy",
    "require_above",
    "require_sizes",
    *_sizes,
]
