async fn issue_invoice(_event: String) -> Result<(), std::io::Error> {
    Ok(())
}

fn main() {
    fn handle(_: impl idem_core::Handler) {}
    handle(issue_invoice);
}
