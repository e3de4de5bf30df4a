"""What a run on Kubernetes promises, and the tests that show it on real pods, on kwok's nodes or on
the rendered chart.

A promise without a test fails here, and so does a test of tests/integration/kubernetes that shows
none of them.
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[2] / "integration/kubernetes"
PROMISES = {
    "two nodes train to the end; killed, deleted, evicted or drained, a run resumes with the same bits": [  # noqa: E501
        "test_a_disturbed_run_resumes_and_its_losses_are_those_of_an_undisturbed_one",
        "test_a_killed_run_on_a_bucket_resumes_with_the_same_bits",
    ],
    "85 is never counted, 2 ends the run, anything else counts up to --max-failures": [
        "test_an_exit_code_restarts_counts_or_ends",
        "test_a_chart_that_counts_85_would_end_the_run",
        "test_term_to_one_pod_of_two_is_never_counted",
    ],
    "accepted nodes are judged under their own names, nothing is left, and a drained one comes back": [  # noqa: E501
        "test_pods_are_judged_under_their_nodes_names_and_leave_nothing",
        "test_a_node_is_cordoned_and_the_printed_command_undoes_it",
    ],
    "a plain Job runs where there is no JobSet, and says that nothing restarts it": [
        "test_a_plain_job_is_never_restarted_and_says_so",
    ],
    "85 again without a newer checkpoint counts": [
        "test_stops_with_nothing_saved_count_from_the_second_on"
    ],
    "a lost node is named with the command that frees it, and two attempts never write": [
        "test_a_lost_node_is_named_and_the_run_goes_on_without_two_writers",
        "test_a_pod_that_runs_on_after_its_node_was_released_ends_before_it_writes_again",
    ],
    "a preempted attempt that runs on writes nothing beside the readmitted run": [
        "test_a_preempted_pod_that_runs_on_writes_nothing_beside_the_readmitted_run",
    ],
    "of two launches of a name at once one submits, and the other is refused in plain words": [
        "test_of_two_launches_of_a_name_at_once_one_submits_and_the_other_is_refused",
    ],
    "why a pod does not start is named while the run waits": [
        "test_an_image_that_cannot_be_pulled_is_named_while_the_run_waits",
        "test_a_volume_that_a_node_cannot_mount_is_named_while_the_run_waits",
        "test_a_quota_that_stops_the_second_pod_or_the_next_run_says_so",
        "test_a_priority_class_that_does_not_exist_is_named",
        "test_a_run_that_was_suspended_by_hand_says_so_and_how_it_goes_on",
    ],
    "each refusal of the API server has its own remedy": [
        "test_a_namespace_whose_quota_counts_cpus_takes_a_run_that_states_them",
        "test_a_missing_service_account_is_named_and_is_no_missing_right",
        "test_a_missing_right_is_answered_with_the_role",
    ],
    "the end of the log is the cause where a program wrote none": [
        "test_the_cause_of_exit_code_2_is_the_end_of_the_log",
    ],
    "the newest image is pulled, and the user of the pods may write to a bucket": [
        "test_an_image_with_the_tag_latest_is_pulled_for_every_pod",
        "test_when_an_image_is_pulled_is_left_to_kubernetes_unless_it_is_set",
        "test_files_of_a_bucket_belong_to_the_user_of_the_pods",
    ],
    "Helm alone can install a run": [
        "test_a_run_of_helm_alone_runs_and_its_notes_are_commands_that_work",
        "test_the_values_of_the_readme_are_a_run",
        "test_a_time_limit_of_a_plain_job_needs_no_queue",
    ],
    "a full volume is the cause that status shows": [
        "test_a_full_volume_is_the_cause_that_status_shows"
    ],
    "runs are read, watched, cancelled, resumed and forgotten, and nothing is left": [
        "test_a_cancelled_run_is_read_and_resumed",
        "test_a_finished_run_is_read_and_watched",
        "test_after_cancel_and_forget_nothing_is_left",
    ],
    "the least rights suffice, and what a missing one hides is said": [
        "test_without_the_right_to_read_events_a_run_is_submitted_and_what_is_not_checked_is_said",
    ],
    "queues: every state from suspended to completed, in one block": [
        "test_a_run_has_one_block_and_the_next_but_one_waits",
        "test_a_run_of_1000_nodes_is_placed",
    ],
    "flex-start: requested, provisioned, revoked, resumed": [
        "test_a_run_waits_for_flex_start_runs_in_one_block_is_revoked_and_is_resumed",
        "test_only_queued_flex_start_asks_the_cloud_for_the_longest_run_time",
    ],
    "over the quota and at the time limit a run says so": [
        "test_a_run_over_the_quota_says_so",
        "test_a_run_at_its_time_limit_says_so",
    ],
    "the chart passes lint and its rules on every machine, and its profiles are those of the table": [  # noqa: E501
        "test_the_chart_passes_lint",
        "test_the_chart_passes_lint_without_values",
        "test_every_machine_of_the_catalog_passes_lint_and_all_rules",
        "test_a_profile_is_as_the_table_has_it",
        "test_the_daemon_of_tcpxo_is_a_native_sidecar_with_what_it_needs",
        "test_settings_that_the_stack_checks_are_sourced_in_the_ranks_shell_and_never_copied",
        "test_a_way_of_buying_selects_its_nodes_and_tolerates_their_taints",
        "test_a_bucket_is_mounted_without_cached_metadata_and_its_sidecar_has_no_limits",
    ],
    "each object is as the controllers read it": [
        "test_a_field_of_the_jobset_is",
        "test_pods_get_the_variables_of_the_launch_contract",
        "test_queue_and_topology_stand_on_the_object_that_kueue_reads",
        "test_the_config_map_is_immutable_and_named_by_its_content",
        "test_without_jobset_it_is_a_job_with_a_headless_service",
        "test_a_release_makes_one_jobset_of_its_name_and_a_pod_per_node",
        "test_a_rank_waits_until_the_name_of_node_0_resolves",
    ],
    "broken charts and wrong values are refused": [
        "test_a_broken_chart_is_refused_by_its_rule",
        "test_a_wrong_value_is_refused_by_helm_itself",
        "test_values_that_contradict_each_other_are_refused_with_the_reason",
        "test_a_release_whose_name_cannot_be_a_host_name_is_refused",
        "test_every_variable_of_a_pod_is_the_charts_and_cannot_be_set",
        "test_two_directories_of_one_name_are_refused_by_the_chart",
    ],
    "a restricted namespace refuses what needs more before anything is made": [
        "test_a_profile_that_the_namespace_forbids_is_refused_before_anything_is_made",
    ],
    "a daemon lives as long as the ranks, and other programs run per node or per GPU": [
        "test_a_daemon_starts_before_the_ranks_and_ends_with_them",
        "test_a_command_per_gpu_runs_once_per_rank_and_its_lines_are_known_by_rank",
    ],
    "the published runs are recipes, field by field": [
        "test_the_recipe_of_70b_on_b200s_is_as_published",
        "test_the_recipe_of_70b_on_b200s_reaches_rdma_as_published",
        "test_the_recipe_of_70b_on_a3_mega_is_as_published",
        "test_512_gpus_are_one_override_and_bf16_is_two_arguments",
    ],
    "the image that is built here trains in a restricted namespace, as its own user": [
        "test_it_trains_as_its_own_user_who_is_not_root",
    ],
    "a killed cluster of the tests leaves nothing": [
        "test_a_killed_cluster_leaves_no_process_mount_or_bridge"
    ],
}


def test_each_promise_has_its_tests_and_each_test_its_promise() -> None:
    found = {
        node.name
        for path in TESTS.glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    promised = [name for tests in PROMISES.values() for name in tests]
    assert all(PROMISES.values()) and len(promised) == len(set(promised))
    assert found == set(promised)
