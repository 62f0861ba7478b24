from partopt.errors import ANSWER_IS_NO, PartoptError, did_you_mean


def test_an_error_says_where_what_and_what_to_do():
    error = (
        PartoptError("'200' has no unit", 'write "200 Gb/s"')
        .at("levels[1].bandwidth")
        .at("cluster.yaml")
    )
    assert (error.message, error.hint, error.exit_code) == (
        "cluster.yaml: levels[1].bandwidth: '200' has no unit",
        'write "200 Gb/s"',
        2,
    )


def test_the_answer_no_keeps_its_exit_code_when_it_is_placed():
    assert PartoptError("it does not fit", exit_code=ANSWER_IS_NO).at("plan").exit_code == 1


def test_several_errors_keep_their_order_their_hints_and_the_worst_exit_code():
    first, second, third = (
        PartoptError("a", "mend a"),
        PartoptError("b", "mend b", ANSWER_IS_NO),
        PartoptError("c"),
    )
    together = PartoptError.together([PartoptError.together([first, second]), third])
    assert [part.hint for part in together.parts] == ["mend a", "mend b", ""]
    assert together.message == "a\nb\nc"
    assert together.exit_code == 2


def test_one_error_together_is_that_error():
    alone = PartoptError("a")
    assert PartoptError.together([alone]) is alone


def test_a_hint_names_the_nearest_or_all():
    assert did_you_mean("pipedrem", ["gpipe", "pipedream"]) == 'did you mean "pipedream"?'
    assert did_you_mean("xyz", ["gpipe", "pipedream"]) == "known: gpipe, pipedream"
    assert did_you_mean("xyz", []) == "known: none"
    assert did_you_mean("xyz", [str(number) for number in range(13)]).endswith("10, 11, ...")
