"""Known defects of the runtime: tests that fail today, by name and case, with the reason.

Each is a strict xfail: once the defect is gone its test passes, the suite fails, and the row goes.
"""

import re

import pytest

REPLAYED = r"(test_)?(full|selective|mixed)"
MOVED = r"(test_)?(swap|disk|mixed)"
ANY = r".*"

KNOWN = [
    # -- silently wrong gradients or state
    (
        r"test_a_selective_replay_of_a_block_that_saves_less_than_traced",
        "saves are matched by size alone; a selective replay hands back memory nobody wrote",
    ),
    (
        r"test_a_branch_inside_a_block\[selective\]",
        "a selective replay that meets other ops keeps what it caught before it noticed",
    ),
    (r"test_conjugated_views", "ViewOf forgets the conjugate and negative bits of a view"),
    (
        r"test_a_graph_kept_over_later_plans\[(rest0-test_(selective|swap|disk|mixed)|rest[123].*)\]",
        "an old graph is read with the rows, slots and lanes of the new plan",
    ),
    (
        rf"test_losses_of_several_steps_with_one_backward\[{ANY}\]",
        "an old graph is read with the rows, slots and lanes of the new plan",
    ),
    (
        r"test_a_graph_half_used_before_later_steps\[(swap|disk)\]",
        "a slot is taken over while its owner is HERE, and the owner trusts it later",
    ),
    (
        rf"test_a_graph_kept_over_later_steps\[{MOVED}\]",
        "letting go of a storage that is LEAVING leaves it so, without a ticket",
    ),
    (
        rf"test_a_fitted_model_inside_a_larger_one\[parameter-{REPLAYED}\]",
        "a foreign parameter is not ours in the forward and is ours, detached, in the replay",
    ),
    (
        r"test_a_buffer_that_the_forward_reads_too"
        r"\[((in place|copy_)-(full|mixed)|set-(full|selective|mixed))\]",
        "a replay sees buffers as the first run left them, not as it found them",
    ),
    (r"test_spectral_norm\[full\]", "a replay takes another step of the power iteration"),
    (
        rf"test_a_buffer_that_only_counts\[set-{REPLAYED}\]",
        "a buffer that is set anew by a replay is not put back",
    ),
    (
        r"test_an_argument_object_changed_by_the_block\[(full|mixed)\]",
        "arguments that pytrees do not know are held by reference",
    ),
    (
        r"test_an_attribute_that_the_caller_sets_for_each_block\[(full|mixed)\]",
        "tensors a block reads past its arguments are not held for its replay",
    ),
    (
        r"test_hooks_that_come_after_the_job\[test_full\]",
        "a pre-hook that runs after ours is not part of the replay",
    ),
    (
        rf"test_a_weight_changed_between_forward_and_backward\[{REPLAYED}\]",
        "a replay uses weights without a look at their versions",
    ),
    (
        r"test_random_numbers_from_elsewhere\[.*-(full|mixed)\]",
        "states of numpy's and Python's generators are not put back",
    ),
    (
        rf"test_a_plain_attribute_that_counts_calls\[{REPLAYED}\]",
        "a replay changes plain attributes of the block's modules",
    ),
    # -- crashes where the unplanned step runs
    (r"test_tables_made_at_the_first_call", "attributes set during a capture stay fake tensors"),
    (r"test_a_model_that_looks_at_values", "the fake capture raises torch's own error"),
    (
        r"test_batch_norm_counts_each_batch_once\[None-.*\]",
        "momentum=None reads a value in capture",
    ),
    (r"test_sparse_arguments", "sparse arguments have no storage to look at"),
    (r"test_an_op_that_fails_and_is_caught", "the timer counts ops that raised"),
    (
        rf"test_copies_and_files_of_a_fitted_model\[{MOVED}\]",
        "deepcopy follows the job's bound hook into its threads",
    ),
    (
        rf"test_an_input_changed_after_the_block_by_its_caller\[{REPLAYED}\]",
        "an input that is changed later bars no recompute",
    ),
    (r"test_a_backward_after_the_job_was_closed", "an assertion instead of an error in words"),
    # -- plans not followed, things left over
    (r"test_no_grad_before_the_blocks", "the trace counts calls without gradients, the runner not"),
    (
        rf"test_a_step_that_raises_in_a_job\[16-1-{REPLAYED}\]",
        "the recording of a failed step is used for the next one's signature",
    ),
    (r"test_hooks_of_the_users_own", "hooks run in captures, on fake tensors, and in replays"),
    (
        r"test_a_graph_freed_without_backward_frees_its_slots\[selective\]",
        "frame and entries of a selective variant hold each other",
    ),
    (r"test_odd_values_spoil_no_others\[(inf|nan)-fp8\]", "one inf or nan takes the scale of all"),
]

SOMETIMES = [
    (
        rf"test_an_op_that_fills_what_it_saved\[{MOVED}\]",
        "rrelu fills its noise after it was saved and copied",
    ),
    (
        r"test_a_change_in_place_does_not_corrupt\[(swap|disk|mixed)\]",
        "the version of a moved tensor is not checked while its copy out is under way",
    ),
    (
        r"test_hooks_that_come_after_the_job\[test_(selective|mixed)\]",
        "a pre-hook that runs after ours is not part of the replay",
    ),
]
"""Defects that depend on which thread or which measured time comes first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the known defects."""
    for item in items:
        for rows, strict in ((KNOWN, True), (SOMETIMES, False)):
            for pattern, reason in rows:
                if re.fullmatch(rf"{pattern}(\[.*\])?", item.name):
                    item.add_marker(pytest.mark.xfail(strict=strict, reason=reason))
