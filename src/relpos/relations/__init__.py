"""Labels for pairs of tokens, from the structure that the tokens stand in (paper, section 3.1).

Distances, grids, trees and graphs become one integer a pair, with a name for each label; tables, a vector for
each label, are the caller's. A label says what the key is to the query, as distance is key minus query.
"""

from relpos.relations._distances import distance_relations, grid_relations
from relpos.relations._graphs import edge_relations
from relpos.relations._labels import NO_RELATION, Relations, combine_relations, stack_relations
from relpos.relations._trees import TREE_NAMES, tree_path_relations, tree_relations

__all__ = [
    "NO_RELATION",
    "TREE_NAMES",
    "Relations",
    "combine_relations",
    "distance_relations",
    "edge_relations",
    "grid_relations",
    "stack_relations",
    "tree_path_relations",
    "tree_relations",
]
