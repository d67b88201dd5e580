//! What compiles, and what the compiler says to what does not. One fixture for each mistake, named after it; the texts
//! were made with the compiler of `rust-toolchain.toml`. `TRYBUILD=overwrite` writes them anew.

#[test]
fn hostile_places_compile() {
    trybuild::TestCases::new().pass("tests/ui/pass/*.rs");
}

#[test]
fn mistakes_are_explained() {
    trybuild::TestCases::new().compile_fail("tests/ui/fail/*.rs");
}
