"""Bucket policies: from the size of a dim to the size it is padded to, or from several sizes together.

Every policy keeps four promises, for all sizes >= 0: `bucket(size) >= size`; a larger size never has a smaller bucket;
`bucket(bucket(size)) == bucket(size)`; the answer depends on the size alone. Sizes 0 and 1 are their own buckets in
every policy, because Dynamo compiles them into graphs of their own. Sizes and buckets count elements along one dim.
Policies know nothing of the minimum and maximum that a dim is marked with: `Bounded` puts those around a policy.
"""

from dynaxla.bucket_policy.base import BucketPolicy, JointPolicy, require_above
from dynaxla.bucket_policy.bounded import Bounded
from dynaxla.bucket_policy.sizes import *  # noqa: F403
from dynaxla.bucket_policy.sizes import DEFAULT, LEAST_WASTE, MOST_WASTE
from dynaxla.bucket_policy.sizes import __all__ as _sizes

__all__ = ["DEFAULT", "LEAST_WASTE", "MOST_WASTE", "Bounded", "BucketPolicy", "JointPolicy", "require_above", *_sizes]
