//! Who may know whom, read from the `use` lines and paths of the sources.

use std::fs;
use std::path::{Path, PathBuf};

/// Every source file below `folder` of the workspace, with its code: comments and blank lines left out.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    let mut folders = vec![root.join(folder)];
    while let Some(folder) = folders.pop() {
        if folder.is_file() {
            found.push(folder);
            continue;
        }
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() || path.extension().is_some_and(|extension| extension == "rs") {
                folders.push(path);
            }
        }
    }
    assert!(!found.is_empty(), "{folder} has no sources: has it moved?");
    found
        .into_iter()
        .map(|path| {
            let code = code_of(&path);
            (path, code)
        })
        .collect()
}

fn code_of(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//") && !line.trim().is_empty());
    // What tests use is not what the product knows.
    lines.take_while(|line| !line.contains("#[cfg(test)]")).collect::<Vec<_>>().join("\n")
}

/// Fails if the code of any file below `folder` mentions one of `words`.
fn must_not_mention(folder: &str, words: &[&str], why: &str) {
    for (path, code) in sources(folder) {
        for line in code.lines() {
            for word in words {
                assert!(!line.contains(word), "{}: `{word}` in `{}`: {why}", path.display(), line.trim());
            }
        }
    }
}

#[test]
fn the_machine_is_pure() {
    must_not_mention(
        "idem-core/src/machine",
        &[
            "async ",
            ".await",
            "tokio",
            "sqlx",
            "tracing",
            "rand::",
            "crate::store",
            "crate::run",
            "crate::handler",
            "crate::clock",
            "::now()",
            "SystemTime",
            "Instant",
        ],
        "the machine imports only values: what decides is a plain function",
    );
}

#[test]
fn the_pure_files_of_the_runtime_know_neither_client_nor_runtime() {
    for file in ["offsets", "assignment", "flow", "dispatch", "careful"] {
        must_not_mention(
            &format!("idem-kafka/src/{file}.rs"),
            &["rdkafka", "tokio", "async ", ".await", "sqlx", "tracing", "::now()"],
            "this file decides, so it must be testable without a broker",
        );
    }
}

#[test]
fn stores_do_not_know_who_runs_them_and_core_does_not_know_kafka() {
    must_not_mention("idem-core/src/store", &["crate::run", "crate::delivery"], "`run` imports `store`, never back");
    must_not_mention(
        "idem-core/src",
        &["rdkafka", "topic", "Partition", "partition:", "offset:"],
        "core is not about Kafka",
    );
}

#[test]
fn sql_lives_in_queries_and_migrations() {
    for (path, code) in sources("idem-core/src").into_iter().chain(sources("idem-kafka/src")) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        // The contract suite needs none; migrate.rs embeds the files and keeps its own bookkeeping statements in queries.rs.
        if name == "queries.rs" || name == "contract.rs" {
            continue;
        }
        for line in code.lines() {
            let upper = line.trim_start_matches(['"', ' ']).to_uppercase();
            for start in ["INSERT INTO ", "UPDATE PROCESSED_JOBS", "DELETE FROM ", "SELECT "] {
                let quoted = line.to_uppercase().contains(&format!("\"{start}"));
                assert!(
                    !quoted && !upper.starts_with(start),
                    "{}: SQL outside queries.rs: {}",
                    path.display(),
                    line.trim()
                );
            }
        }
    }
}

#[test]
fn offsets_are_committed_in_one_file() {
    for (path, code) in sources("idem-kafka/src") {
        if path.ends_with("runtime/commit.rs") {
            continue;
        }
        for call in ["rd_kafka_commit", "store_offset", ".commit(&", "CommitMode"] {
            assert!(!code.contains(call), "{}: `{call}` outside runtime/commit.rs", path.display());
        }
    }
}

#[test]
fn the_clock_is_read_in_one_file() {
    for (path, code) in sources("idem-core/src").into_iter().chain(sources("idem-kafka/src")) {
        if path.ends_with("clock.rs") {
            continue;
        }
        for call in ["Instant::now()", "SystemTime::now()"] {
            assert!(!code.contains(call), "{}: `{call}` outside clock.rs", path.display());
        }
    }
}

#[test]
fn dependencies_point_one_way() {
    let manifest = |of: &str| {
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(of).join("Cargo.toml")).unwrap()
    };
    let dependencies = |of: &str| {
        let text = manifest(of);
        let after = text.split("[dependencies]").nth(1).unwrap_or_default().to_owned();
        after.split("\n[").next().unwrap_or_default().to_owned()
    };
    assert!(!dependencies("idem-macros").contains("idem-"), "the macro depends on no crate of the workspace");
    assert!(!dependencies("idem-core").contains("idem-kafka"), "core does not know the runtime");
    assert!(!dependencies("idem-core").contains("rdkafka"), "core does not know the client");
    assert!(!dependencies("idem-kafka").contains("idem-examples"), "nothing depends on the examples");
}
